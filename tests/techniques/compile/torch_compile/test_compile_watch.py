"""A compiler that gives up silently does not go unnoticed."""

import pytest
import torch
from torch import nn

from flatout.records.errors import NotApplicable
from flatout.techniques.compile.torch_compile import compiled_switch
from flatout.techniques.compile.torch_compile.compile_watch import (
    STORM,
    CompileWatch,
    recorded_graphs,
)

pytestmark = pytest.mark.filterwarnings("ignore")


class Net(nn.Module):
    def forward(self, x):
        return torch.sin(x) * 2


@pytest.fixture
def compiled():
    """Return a function that calls a compiled module on inputs of so many sizes."""
    torch._dynamo.reset()

    def call(sizes, **options):
        net = Net()
        net.compile(backend="eager", **options)
        for size in range(2, 2 + sizes):
            net(torch.ones(size, 4))

    return call


def test_the_silent_fall_back_to_eager_is_told_with_its_reason(compiled):
    watch = CompileWatch().begin()

    compiled(12, dynamic=False)

    with pytest.raises(NotApplicable, match=r"went on eagerly, silently: .*size mismatch"):
        watch.report()


def test_a_switch_that_was_off_meanwhile_is_not_blamed(compiled):
    watch = CompileWatch().begin()
    turn = compiled_switch([], watch)

    compiled(12, dynamic=False)
    turn(is_on=True)

    watch.check()


def test_compiling_without_end_is_a_storm(compiled):
    watch = CompileWatch().begin()

    compiled(STORM + 1, dynamic=False)

    with pytest.raises(NotApplicable, match=f"forward was compiled {STORM + 1} times"):
        watch.report()


def test_one_version_for_every_size_is_no_storm(compiled):
    watch = CompileWatch().begin()

    compiled(12, dynamic=True)

    assert watch.report().startswith("1 regions compiled")


def test_what_was_compiled_before_does_not_count(compiled):
    compiled(STORM + 1, dynamic=False)
    watch = CompileWatch().begin()
    torch._dynamo.reset()

    compiled(1)

    assert watch.report() == "1 regions compiled, 0 of them again"


def test_a_record_that_was_full_already_hides_nothing(compiled):
    torch._dynamo.utils.set_compilation_metrics_limit(2)
    compiled(3, dynamic=False)
    watch = CompileWatch().begin()
    torch._dynamo.reset()

    compiled(4, dynamic=False)

    assert watch.report() == "1 regions compiled, 3 of them again"


def test_a_compiler_that_nothing_reached_is_told():
    with pytest.raises(NotApplicable, match="compiled nothing"):
        CompileWatch().begin().report()


def skip(reason):
    """Skip a CUDA graph as torch does."""
    from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter

    log_cudagraph_skip_and_bump_counter(f"skipping cudagraphs due to {reason}")


def test_a_training_whose_every_cuda_graph_was_skipped_is_told_with_the_reason():
    watch = CompileWatch().begin()

    skip("mutated inputs (1 instances). Found from : \n net.py, line 3")

    with pytest.raises(NotApplicable, match=r"no CUDA graph .*silently: mutated inputs \(1"):
        watch.graphs_report(0)
    with pytest.raises(NotApplicable, match="mutated inputs"):
        watch.graphs_report(None)
    assert watch.graphs_report(2).startswith(", 2 CUDA graphs recorded, others skipped: mutated")


def test_cuda_graphs_that_torch_did_not_begin_are_told_without_a_reason_too():
    watch = CompileWatch().begin()

    with pytest.raises(NotApplicable, match="it gave no reason"):
        watch.graphs_report(None)
    assert watch.graphs_report(0) == ", 0 CUDA graphs recorded"


@pytest.mark.skipif(torch.cuda.is_available(), reason="another test may have recorded graphs")
def test_without_a_device_no_cuda_graph_was_begun():
    assert recorded_graphs() is None
