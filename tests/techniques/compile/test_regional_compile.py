import copy

import pytest
import torch
from torch import nn

from flatout.records.errors import NotApplicable
from flatout.techniques.compile import regional_compile
from flatout.techniques.compile.regional_compile import (
    RegionalCompile,
    compile_blocks,
    repeated_blocks,
)
from flatout.techniques.compile.torch_compile import TorchCompile, compile_watch
from tests.techniques.facts import machine, model, profile
from tests.techniques.small_training import gradients

PROMISE = ("naive_gpt.py", {})

# Torch's own compiler warns about itself.
pytestmark = pytest.mark.filterwarnings("ignore")


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + nn.functional.gelu(self.linear(self.norm(x)))


class Stack(nn.Module):
    def __init__(self, *widths):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for width in widths)
        self.head = nn.Linear(widths[-1], 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def is_compiled(module):
    return module._compiled_call_impl is not None


@pytest.mark.slow
def test_gradients_match_eager_and_one_graph_serves_all_blocks_but_the_first():
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = Stack(8, 8, 8, 8)
    compiled = RegionalCompile().model(copy.deepcopy(eager))
    torch._dynamo.utils.counters.clear()

    found, expected = gradients(compiled), gradients(eager)

    # The first block's input needs no gradient: that is a graph of its own.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_one_graph_serves_blocks_of_torch_nn_itself():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(12)))

    compile_blocks(blocks)
    blocks(torch.randn(3, 8, requires_grad=True)).sum().backward()

    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_only_blocks_of_equal_shapes_are_compiled():
    stack = Stack(8, 8, 8, 16, 16)

    assert compile_blocks(stack) == 3

    assert [is_compiled(block) for block in stack.blocks] == [True, True, True, False, False]
    assert not is_compiled(stack)
    assert not is_compiled(stack.head)


def test_the_outermost_group_is_taken_and_not_what_lies_in_it():
    outer = nn.ModuleList(nn.Sequential(Block(), Block(), Block()) for _ in range(3))

    (group,) = repeated_blocks(nn.Sequential(outer))

    assert group == list(outer)


def test_groups_are_found_in_every_part_of_the_model():
    parts = nn.ModuleDict({"encoder": Stack(8, 8, 8), "decoder": Stack(16, 16, 16, 16)})

    assert [len(group) for group in repeated_blocks(parts)] == [3, 4]


def test_no_more_groups_are_compiled_than_torch_keeps_versions_of():
    stages = nn.ModuleList(Stack(*[width] * 3) for width in (4, 8, 16, 32, 64))

    assert compile_blocks(stages) == 9

    assert [is_compiled(stage.blocks[0]) for stage in stages] == [False, False, True, True, True]


def test_three_groups_of_one_class_in_training_and_evaluation_are_no_storm(monkeypatch):
    """A version for each group in each mode, and more for first blocks."""
    torch._dynamo.reset()
    monkeypatch.setattr(regional_compile, "compile_in_place", lambda b: b.compile(backend="eager"))
    stages = nn.ModuleList(Stack(*[width] * 3) for width in (4, 8, 16))
    known = len(compile_watch._compilations())

    technique = RegionalCompile()
    technique.model(stages)
    for stage, width in zip(stages, (4, 8, 16), strict=True):
        # As in a model: what comes before the first stage alone needs no gradient.
        x = torch.ones(2, width, requires_grad=width > 4)
        stage.train()(x)
        with torch.no_grad():
            stage.eval()(torch.ones(2, width))

    made = compile_watch._compilations()[known:]
    assert len({one.co_firstlineno for one in made}) == 1
    assert len(made) > compile_watch.STORM
    assert technique.end() == f"1 regions compiled, {len(made) - 1} of them again"


def test_a_model_without_repeated_blocks_is_left_alone():
    with pytest.raises(NotApplicable, match="no 3 identical sibling blocks"):
        RegionalCompile().model(Stack(8, 8))


def test_whole_and_regional_compilation_exclude_each_other():
    stack = RegionalCompile().model(Stack(8, 8, 8))

    with pytest.raises(NotApplicable, match=r"another technique of the recipe compiled blocks\.0"):
        TorchCompile().model(stack)


def test_its_startup_is_predicted_shorter_than_that_of_the_whole_model():
    facts = profile(models=(model(repeated_blocks=12, modules=150),))

    (found,) = RegionalCompile.candidates(facts, machine())

    part, whole = found.predict(facts, machine()), TorchCompile().predict(facts, machine())
    assert part.step_ms == whole.step_ms
    assert part.startup_s < whole.startup_s / 2


@pytest.mark.parametrize(
    "facts",
    [model(repeated_blocks=2), model(repeated_blocks=12, is_compiled=True), model()],
)
def test_it_is_not_offered_where_it_cannot_matter(facts):
    assert RegionalCompile.candidates(profile(models=(facts,)), machine()) == ()
