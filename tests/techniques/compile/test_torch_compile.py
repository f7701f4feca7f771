import copy
import os

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache

from flatout.records.catalogue import build
from flatout.records.errors import NotApplicable, UserError
from flatout.records.recipe import Choice, Recipe
from flatout.techniques.compile.regional_compile import RegionalCompile
from flatout.techniques.compile.torch_compile import (
    TorchCompile,
    check_compilable,
    compile_in_place,
    find_trouble,
    load_compiled,
    save_compiled,
    saved_path,
    with_marked_lengths,
)
from tests.support.programs import python
from tests.techniques.facts import loader, machine, model, profile
from tests.techniques.guarded import played
from tests.techniques.small_training import gradients, network

PROMISE = ("naive_gpt.py", {})

# Torch's own compiler warns about itself.
pytestmark = pytest.mark.filterwarnings("ignore")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = network()

    def forward(self, x):
        return self.layers(x)


@pytest.mark.slow
@pytest.mark.parametrize("build", [Net, network])
def test_one_graph_is_compiled_and_its_gradients_match_eager_up_to_rounding(build):
    torch._dynamo.reset()
    eager = build()
    compiled = TorchCompile().model(copy.deepcopy(eager))
    torch._dynamo.utils.counters.clear()

    found, expected = gradients(compiled), gradients(eager)

    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_the_module_stays_itself_with_its_parameters_and_keys():
    plain = network()
    keys, parameters = list(plain.state_dict()), list(plain.parameters())

    compiled = TorchCompile().model(plain)

    assert compiled is plain
    assert list(compiled.state_dict()) == keys
    assert all(a is b for a, b in zip(compiled.parameters(), parameters, strict=True))
    assert compiled._compiled_call_impl is not None
    assert copy.deepcopy(compiled)._compiled_call_impl is None


def test_a_model_that_the_script_compiled_is_left_alone():
    by_function = torch.compile(network())
    in_part = network()
    in_part[0].compile()

    with pytest.raises(NotApplicable, match="compiled the model itself"):
        TorchCompile().model(by_function)
    with pytest.raises(NotApplicable, match="compiled 0 itself"):
        TorchCompile().model(in_part)


def test_a_model_that_another_technique_compiled_names_no_script():
    once = TorchCompile().model(network())

    with pytest.raises(NotApplicable, match="another technique of the recipe compiled the model"):
        TorchCompile().model(once)


def test_its_other_settings_are_offered_on_top_of_itself_and_of_no_other_compiler():
    def facts(who):
        compiled = model(is_compiled=True, compiled_by=who)
        return profile(kind="cuda", models=(compiled,))

    assert TorchCompile(mode="reduce-overhead") in TorchCompile.candidates(
        facts("torch_compile"), machine()
    )
    assert TorchCompile.candidates(facts("regional_compile"), machine()) == ()
    assert RegionalCompile.candidates(facts("torch_compile"), machine()) == ()


def test_a_recurrent_layer_that_torch_would_not_compile_is_left_alone():
    with pytest.raises(NotApplicable, match="recurrent layers"):
        TorchCompile().model(nn.LSTM(4, 4))


def test_without_a_compiler_the_reason_is_told(monkeypatch):
    from torch._inductor import cpp_builder

    def no_compiler():
        raise RuntimeError("no C++ compiler found")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", no_compiler)

    with pytest.raises(NotApplicable, match=r"not available here: no C\+\+ compiler found"):
        check_compilable(network())


def test_this_machine_can_compile_for_the_cpu():
    assert find_trouble("cpu") is None


def test_the_startup_grows_with_the_model():
    facts = profile(models=(model(modules=60),))

    (found,) = TorchCompile.candidates(facts, machine())

    effect = found.predict(facts, machine())
    assert effect.step_ms == pytest.approx(-100 * (1 - 1 / 1.15))
    assert effect.startup_s == pytest.approx(30.0)


@pytest.mark.parametrize("facts", [(), (model(is_compiled=True),)])
def test_it_is_not_offered_where_it_cannot_matter(facts):
    assert TorchCompile.candidates(profile(models=facts), machine()) == ()


@pytest.mark.slow
def test_a_real_script_says_what_was_compiled():
    trial = played("naive_gpt.py", "torch_compile")

    (applied,) = trial.applied
    assert applied.status == "applied", applied
    assert "regions compiled" in applied.why
    assert [m.compiled_by for m in trial.profile.models] == ["torch_compile"]


@pytest.mark.slow
def test_a_real_script_whose_model_never_stays_the_same_is_refused():
    trial = played("restless.py", "torch_compile")

    (applied,) = trial.applied
    assert applied.status == "not_applicable"
    assert "eagerly, silently" in applied.why or "recompile storm" in applied.why


def test_shapes_that_vary_a_lot_get_one_version_for_all():
    facts = profile(models=(model(input_shapes=30),))

    assert TorchCompile.candidates(facts, machine()) == [TorchCompile(shapes="dynamic")]


def test_cuda_graphs_are_offered_for_one_shape_on_a_gpu_only():
    one, two = (profile(kind="cuda", models=(model(input_shapes=n),)) for n in (1, 2))

    assert TorchCompile(mode="reduce-overhead") in TorchCompile.candidates(one, machine())
    assert TorchCompile.candidates(two, machine()) == [TorchCompile()]
    with pytest.raises(NotApplicable, match="CUDA device"):
        TorchCompile(mode="reduce-overhead").model(network())


def test_cuda_graphs_that_were_never_recorded_are_refused_in_the_end():
    torch._dynamo.reset()
    net, technique = Net(), TorchCompile(mode="reduce-overhead")
    technique.watch.begin()
    net.compile(backend="eager")
    net(torch.ones(2, 8))

    with pytest.raises(NotApplicable, match="recorded no CUDA graph"):
        technique.end()


def test_cuda_graphs_are_not_offered_where_gradients_add_up():
    facts = profile(kind="cuda", models=(model(input_shapes=1),), backwards_per_step=4.0)

    assert TorchCompile.candidates(facts, machine()) == [TorchCompile()]


@pytest.mark.parametrize("build", [Net, network])
def test_outputs_leave_the_graph_s_memory_in_training_and_evaluation_without_marks(
    build, monkeypatch
):
    """A replay writes all outputs to one place, as those of a CUDA graph; its mark frees more."""
    place, marks = torch.empty(2, 4), []

    def replayed(function, **_):
        return lambda *given: place.copy_(function(*given).detach())

    monkeypatch.setattr(torch, "compile", replayed)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1))
    plain = build()
    compiled = copy.deepcopy(plain)
    compile_in_place(compiled, mode="reduce-overhead")
    call = TorchCompile(mode="reduce-overhead").forward(compiled, compiled)
    ones, twos = torch.ones(2, 8), torch.full((2, 8), 2.0)

    trained = [call(ones), call(twos)]
    evaluated = [compiled.eval()(ones), compiled(twos)]

    for found in (trained, evaluated):
        assert torch.equal(found[0], plain(ones))
        assert torch.equal(found[1], plain(twos))
    assert not marks


def test_lengths_are_marked_for_texts_whose_shapes_vary():
    def texts(shapes):
        return profile(loaders=(loader(pad_share=0.3),), models=(model(input_shapes=shapes),))

    assert TorchCompile.candidates(texts(5), machine()) == [
        TorchCompile(),
        TorchCompile(shapes="lengths"),
    ]
    assert TorchCompile(shapes="lengths") in TorchCompile.candidates(texts(30), machine())
    assert TorchCompile.candidates(texts(1), machine()) == [TorchCompile()]


@pytest.mark.slow
def test_a_marked_length_is_compiled_once_and_what_was_compiled_is_kept(tmp_path):
    def compiled():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        found = Net()
        compile_in_place(found)
        call = with_marked_lengths(found)
        for length in (5, 9, 17):
            call(torch.randn(2, length, 8))
        return torch._dynamo.utils.counters

    path = tmp_path / "kept" / "compiled.bin"
    assert not load_compiled(path)
    with fresh_cache():
        graphs = compiled()["stats"]["unique_graphs"]
        words = save_compiled(path)
    with fresh_cache():
        assert load_compiled(path)
        hits = compiled()["inductor"]["fxgraph_cache_hit"]

    assert graphs == 1
    assert words == ", kept in compiled.bin"
    assert hits >= 1


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/b", ".bashrc", "a\nb", "x" * 101])
def test_a_recipe_names_no_file_outside_flatouts_cache_folder(name):
    recipe = Recipe(choices=(Choice(technique="torch_compile", settings={"cache": name}),))

    with pytest.raises(UserError, match="is no plain name"):
        build(recipe)


def test_a_plain_name_is_a_file_in_flatouts_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    assert saved_path(TorchCompile(cache="gpt-2.bin").cache).parent == tmp_path / "flatout/saved"


@pytest.mark.gpu
def test_a_model_in_cuda_graphs_trains_as_the_eager_one():
    from torch._dynamo.utils import counters
    from torch._inductor.cudagraph_trees import get_manager

    torch._dynamo.reset()
    counters.clear()
    eager = network().cuda()
    compiled = copy.deepcopy(eager)
    technique = TorchCompile(mode="reduce-overhead")
    call = technique.forward(technique.model(compiled), compiled)
    x = torch.randn(6, 32, 8, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    outputs = []

    for module, calls in ((eager, eager), (compiled, call)):
        stepper = torch.optim.SGD(module.parameters(), lr=0.1)
        outputs.append([])
        for batch in x:
            stepper.zero_grad()
            made = calls(batch)
            made.square().mean().backward()
            stepper.step()
            outputs[-1].append(made.detach())  # the next replay must not write over it

    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(
        list(compiled.parameters()), list(eager.parameters()), rtol=1e-3, atol=1e-5
    )
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert "CUDA graphs recorded" in technique.end()
    assert get_manager(torch.cuda.current_device(), create_if_none_exists=False) is not None


TWICE = """
import sys, torch
from torch._dynamo.utils import counters
from flatout.techniques.compile.torch_compile import compile_in_place
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 2))
compile_in_place(model)
model(torch.ones(4, 8)).sum().backward()
found = counters["inductor"]
print(found["fxgraph_cache_hit"], found["fxgraph_cache_miss"])
"""


@pytest.mark.slow
def test_a_second_process_starts_from_what_the_first_one_compiled(tmp_path):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}

    first, second = (
        [int(word) for word in python(["-c", TWICE], env=environment, check=True).stdout.split()]
        for _ in range(2)
    )

    assert first[0] == 0 < first[1]
    assert second[0] > 0 == second[1]
