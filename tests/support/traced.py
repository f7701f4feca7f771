"""The memory of a target that is traced once."""

from flatout.planner.memory_trace import open_tracer
from flatout.planner.tracing.script import TraceRequest

AS_IT_IS = TraceRequest()


def trace_memory(target, arguments=(), request=AS_IT_IS):
    """Return the allocations of a target's first steps."""
    with open_tracer(target, arguments) as trace:
        return trace(request)
