"""Find attention that a module writes out by hand, and let torch's own operator compute it.

A module's `forward` is traced into a graph of its calls. Where the graph holds
`softmax(q @ k^T * scale + mask) @ v`, those calls become one. The module gets the new forward only
after both were run on the inputs of a real call, in float64, and gave equal outputs and gradients.
"""

import inspect
import math
import operator
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from flatout.kernels.attend import Causal, attend
from flatout.kernels.attention_pattern import Pattern, find_pattern, is_constant
from flatout.kernels.proof import TOLERANCE, difference, plain_facts, result_of, streams_kept
from flatout.profiling.attention import unseen


class NoPatternError(Exception):
    """This module holds no attention that can be replaced; the text says why."""


def capture(root: nn.Module, modules: Sequence[nn.Module], call: Callable[[], Any]) -> list[Any]:
    """Return the arguments with which each module is first called in a call that leaves no trace.

    Gradients are off, random states and buffers are put back, and autocast forgets its casts.
    """
    seen: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.setdefault(id(module), (args, kwargs))

    handles = [m.register_forward_pre_hook(keep, with_kwargs=True) for m in modules]
    buffers = [(buffer, buffer.clone()) for buffer in root.buffers()]
    try:
        with streams_kept(), torch.no_grad(), unseen():
            call()
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        # Torch 2.9 hands the real call the casts that autocast made here, without gradients: the
        # weights would get none (pytorch issue 158232, mended by pull request 165068).
        torch.clear_autocast_cache()
    return [seen.get(id(module)) for module in modules]


def find_obstacle_or_replace(
    module: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]] | None
) -> str:
    """Replace a module's attention, given one call of it; return what stands against it, or ""."""
    if call is None:
        return "it was not called"
    try:
        replace(module, *call)
    except NoPatternError as reason:
        return str(reason)
    except torch.OutOfMemoryError:
        return "there is no memory to compare it in"
    finally:
        forget_proof(module)
    return ""


def forget_proof(module: nn.Module) -> None:
    """Give back the memory of a proof: its peak in float64 is not that of the training."""
    devices = {parameter.device for parameter in module.parameters() if parameter.is_cuda}
    for device in devices:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def replace(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Replace the attentions in a module's forward; return how many there were.

    Raises:
        NoPatternError: with the reason, if none was found or proven.
    """
    if "forward" in vars(module):
        raise NoPatternError("its forward was replaced already")
    original = module.forward
    signature = inspect.signature(original)
    if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in signature.parameters.values()):
        raise NoPatternError("its forward takes arguments without names")
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    plain = {k: v for k, v in bound.arguments.items() if not isinstance(v, torch.Tensor)}
    if any(_holds_tensor(value) for value in plain.values()):
        raise NoPatternError("its forward takes tensors inside of other arguments")
    graph = _trace(module, plain)
    count = 0
    while (pattern := find_pattern(graph, module)) is not None:
        _rewrite(graph, pattern)
        count += 1
    if not count:
        raise NoPatternError("no softmax(q @ k^T) @ v in its forward")
    rewritten = _compile(graph)
    facts = plain_facts(module)
    _prove(module, original, types.MethodType(rewritten, module), bound)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        same = self.training and facts.hold(self)
        for name, value in given.arguments.items():
            same = same and (
                value == plain[name] if name in plain else isinstance(value, torch.Tensor)
            )
        run = rewritten if same else type(self).forward
        return run(self, *given.args, **given.kwargs)

    # A bound method: a deep copy of the module, as averages make, gets one bound to itself.
    module.forward = types.MethodType(forward, module)
    return count


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensor, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_tensor, value))
    known = (bool, int, float, str, type(None), torch.dtype, torch.device)
    return not isinstance(value, known)


class _Tracer(fx.Tracer):
    """Traces one forward; every module inside is a call."""

    proxy_buffer_attributes = True
    """A mask kept as a buffer is sliced to the length of the input."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        del m, module_qualified_name
        return True

    def iter(self, obj: fx.Proxy) -> Any:
        """Yield the parts of `chunk`, whose number is written in the call."""
        node = obj.node
        if node.target in ("chunk", torch.chunk) and isinstance(node.args[1], int):
            parts: Any = obj
            return iter([parts[place] for place in range(node.args[1])])
        return super().iter(obj)


def _trace(module: nn.Module, plain: Mapping[str, Any]) -> fx.Graph:
    before = dict(vars(module))
    try:
        with warnings.catch_warnings(), streams_kept() as drawn:
            warnings.simplefilter("ignore")
            tracer = _Tracer(autowrap_modules=(math,))
            graph = tracer.trace(module, concrete_args=dict(plain) or None)
    except Exception as error:  # noqa: BLE001  whatever a script's code does to stand-ins
        raise NoPatternError(f"its forward depends on values: {error}"[:200]) from None
    finally:
        changed = {k for k, v in vars(module).items() if before.get(k, NoPatternError) is not v}
        vars(module).clear()
        vars(module).update(before)
    if changed:
        raise NoPatternError(f"its forward sets {', '.join(sorted(changed))} on the module")
    if drawn:
        # The graph holds what was drawn this once, or the branch that was taken by it.
        raise NoPatternError(f"its forward draws from {', '.join(drawn)} by itself")
    return graph


def _compile(graph: fx.Graph) -> Callable[..., Any]:
    """Return the graph as a function of the module and the arguments of its forward."""
    code = graph.python_code("self")
    space = dict(code.globals)
    exec(compile(code.src, "<attention>", "exec"), space)  # fx generates it  # noqa: S102  the model's own source
    forward: Callable[..., Any] = space["forward"]
    return forward


def _rewrite(graph: fx.Graph, pattern: Pattern) -> None:
    end = pattern.end
    with graph.inserting_before(end):
        k: Any = pattern.k
        if pattern.is_transposed:
            k = graph.call_method("transpose", (k, -2, -1))
        scale: Any = 1.0
        for kind, factor in pattern.scale:
            operation = operator.mul if kind == "mul" else operator.truediv
            if isinstance(scale, float) and not isinstance(factor, fx.Node):
                scale = operation(scale, float(factor))
            else:
                scale = graph.call_function(operation, (scale, factor))
        nodes = [value for _, value, _ in pattern.masks]
        causal = Causal() if nodes and all(map(is_constant, nodes)) else None
        dropout = pattern.dropout
        if isinstance(dropout, fx.Node):
            module = graph.get_attr(str(dropout.target))
            dropout = graph.call_function(active_probability, (module,))
        arguments = (pattern.q, k, pattern.v, scale, list(pattern.masks), dropout)
        made = graph.call_function(_with(causal), arguments)
    end.replace_all_uses_with(made)
    _erase(graph, end)


def active_probability(dropout: nn.Dropout) -> float:
    """Return what a dropout module drops now."""
    return dropout.p if dropout.training else 0.0


def _erase(graph: fx.Graph, end: fx.Node) -> None:
    """Take out a node and whatever was computed for it alone."""
    behind = {end}
    for node in reversed(graph.nodes):
        if node in behind and not node.users and node.op != "placeholder":
            behind.update(node.all_input_nodes)
            graph.erase_node(node)


def _with(causal: Causal | None) -> Callable[..., torch.Tensor]:
    """Return the attention with its memory of masks; looked up when called, for the proof."""

    def attention(*given: Any) -> torch.Tensor:
        return attend(*given, causal=causal)

    return attention


def _prove(
    module: nn.Module,
    original: Callable[..., Any],
    rewritten: Callable[..., Any],
    bound: inspect.BoundArguments,
) -> None:
    """Compare outputs and gradients of both forwards in float64 on the inputs of a real call."""
    expected = result_of(module, original, bound.arguments)
    if not expected.outputs:
        raise NoPatternError("its forward returns no tensors")
    off = difference(expected, result_of(module, rewritten, bound.arguments))
    if not off <= TOLERANCE:
        raise NoPatternError(f"outputs or gradients differ by {off:.1g} on the real inputs")
