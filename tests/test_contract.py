"""Every technique keeps the contract of `flatout.records.technique`; new files are found."""

import ast
import dataclasses
import importlib
import inspect
import json
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pytest
from torch.utils.data import DataLoader

from flatout.records import catalogue
from flatout.records.errors import NotApplicable
from flatout.records.journey import WORKERS, Journey, Leg, WorkerFacts
from flatout.records.machine import Device, Machine
from flatout.records.memory import MemoryStory
from flatout.records.profile import PHASES, PeakBytes, Profile, Spread
from flatout.records.readings import SyncPoint
from flatout.records.recipe import Choice, Recipe
from flatout.records.technique import Numerics, Technique, hook_points_of
from flatout.workflow.recipe_files import read_recipe, write_recipe
from tests.data.packs import packed
from tests.techniques import facts

NAMES = catalogue.names()
HEADINGS = ("What it does:", "When it helps:", "What it costs:", "How it is checked:")
PLAIN = ("numerics", "addresses", "stages", "keeps_samples", "prepared_by", "sets")
"""Attributes that other parts read from the sources, so that they need not import torch."""
GIB = 1024**3
OF_MEMORY = {"out_of_memory", "fragmented_memory"}


def machine(kind="cpu", *, cores=8):
    """Return a machine on which everything that a technique may need is there."""
    cpu = Device(kind="cpu", name="Some CPU", memory_bytes=64 * GIB)
    name, capability = ("Tesla T4", (7, 5)) if kind == "turing" else ("NVIDIA H200", (9, 0))
    gpu = Device(kind="cuda", name=name, memory_bytes=140 * GIB, compute_capability=capability)
    kind = "cuda" if kind == "turing" else kind
    return Machine(
        device=gpu if kind == "cuda" else cpu,
        devices=(gpu,) if kind == "cuda" else (),
        cpu_name="Some CPU",
        logical_cores=2 * cores,
        usable_cores=cores,
        physical_cores=cores,
        memory_bytes=64 * GIB,
        shm_free_bytes=16 * GIB,
        cpu_features=frozenset({"avx2", "avx512f", "avx512_bf16", "amx_bf16"}),
        tcmalloc_path="/usr/lib/libtcmalloc_minimal.so.4",
        torch_version="2.13.0",
        facts={"compiler": "/usr/bin/g++"},
    )


def profile(kind="cpu", *, phases=(100, 20, 30, 60, 20, 5), workers=0, conv=0, threads=4):
    """Return the profile of a plain fp32 training, slow in every phase."""
    total = float(sum(phases))
    return Profile(
        step_ms=Spread(median=total, p10=total * 0.95, p90=total * 1.1, n=40),
        phases_ms=dict(zip(PHASES, map(float, phases), strict=True)),
        samples_per_s=64 / total * 1000,
        samples_per_step=64,
        device_kind=kind,
        device_name="Some device",
        device_busy_share=0.6,
        peak_bytes=PeakBytes(allocated=2 * GIB, reserved=3 * GIB, device=4 * GIB),
        epoch_steps=100,
        journey=journey(workers),
        cpu_threads=threads,
        collection_ms_per_step=total * 0.03,
        minor_faults_per_step=50_000.0,
        warmup_steps=3,
        loaders=(loader_facts(workers),),
        models=(model_facts(conv),),
        optimizers=(
            facts.optimizer(parameters=25_000_000, has_foreach_option=True, parameter_tensors=160),
        ),
    )


def journey(workers):
    """Return workers that are busy with more than one thread each, and blocked in cold reads."""
    legs = (("read", 40.0), ("decode", 120.0), ("collate", 20.0))
    seen = {
        "busy_share": 0.9,
        "user_share": 1.5,
        "system_share": 0.2,
        "voluntary_switches_per_s": 100.0,
        "involuntary_switches_per_s": 900.0,
        "storage_bytes_per_step": 5e6,
        "read_bytes_per_step": 9e6,
        "pss_bytes": 300 * 1024**2,
    }
    return Journey(
        legs=tuple(
            Leg(name=name, where=WORKERS, ms=ms, share=ms / 235, per_sample_ms=ms / 64)
            for name, ms in legs
        ),
        workers=tuple(WorkerFacts(number=number, **seen) for number in range(workers)),
    )


def loader_facts(workers):
    return facts.loader(
        address="main:0",
        dataset_len=6400,
        batch_size=64,
        num_workers=workers,
        prefetch_factor=2 if workers else None,
        batch_bytes=64 * 3 * 224 * 224 * 4,
        batches_drawn=50,
        epochs_started=2,
        fetch_ms=0.0 if workers else 100.0,
    )


def model_facts(conv):
    return facts.model(
        parameters=25_000_000,
        parameter_bytes=100_000_000,
        conv_weights=conv,
        repeated_blocks=12,
        softmax_modules=12,
        head_parameters=5_000_000,
        modules=150,
    )


def texts(found, *, shapes):
    """Return the training of a language model on padded texts that its data set tokenises."""
    loaders = [
        dataclasses.replace(loader, tokenizes="data set", pad_share=0.4) for loader in found.loaders
    ]
    models = [
        dataclasses.replace(model, name="LlamaForCausalLM", input_shapes=shapes)
        for model in found.models
    ]
    return dataclasses.replace(found, loaders=tuple(loaders), models=tuple(models))


def full(found):
    """Return the same training on a device whose memory is nearly used up."""
    story = MemoryStory(
        peak_bytes=30 * GIB,
        peak_phase="backward",
        by_phase={},
        by_module={},
        allocation_retries=2,
        fragmentation_share=0.2,
    )
    return dataclasses.replace(
        found,
        peak_bytes=PeakBytes(allocated=30 * GIB, reserved=120 * GIB, device=122 * GIB),
        memory=story,
        models=tuple(dataclasses.replace(m, widest_output=50257) for m in found.models),
    )


def large(found):
    """Return the same training of billions of parameters."""
    models = tuple(dataclasses.replace(m, parameters=3_000_000_000) for m in found.models)
    return dataclasses.replace(found, models=models)


def waiting(found):
    """Return the same training with a loss that is read in each step."""
    point = SyncPoint(line="train.py:40", what="item", per_step=1.0, ms_per_step=20.0)
    return dataclasses.replace(found, syncs=(point,))


def mixing(found):
    """Return the same training of a mixture of experts."""
    models = tuple(
        dataclasses.replace(
            m,
            experts=8,
            expert_parameters=20_000_000,
            attention_backend="flash",
            odd_parameters=2_000_000,
        )
        for m in found.models
    )
    return dataclasses.replace(found, models=models)


CASES = [
    (profile(kind, workers=workers, conv=conv, threads=threads), machine(kind))
    for kind in ("cpu", "cuda")
    for workers, conv, threads in ((0, 53, 4), (2, 0, 16), (2, 53, 1))
] + [
    (profile("cuda", conv=53), machine("turing")),
    (full(profile("cuda")), machine("cuda")),
    (large(profile("cuda")), machine("cuda")),
    (waiting(profile("cuda")), machine("cuda")),
    (mixing(profile()), machine()),
    (mixing(profile("cuda")), machine("cuda")),
    (texts(profile(workers=2), shapes=1), machine()),
    (texts(profile("cuda"), shapes=9), machine("cuda")),
    (dataclasses.replace(profile(workers=2, threads=2), delay_share=0.9), machine()),
]
"""Trainings that leave something to gain on every hook point."""


@pytest.fixture(scope="module", autouse=True)
def packed_store(tmp_path_factory):
    """Name a packed store, which a technique may read from."""
    root = tmp_path_factory.mktemp("packed")
    np.save(root / "numbers.npy", np.arange(100))
    packed(root / "numbers.npy", root / "numbers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLATOUT_PACKED", str(root / "numbers"))
        yield


def kind_of(name):
    return catalogue.technique_class(name)


def module_of(name):
    return importlib.import_module(kind_of(name).__module__)


def decorators_of(kind):
    """Return the decorators as they are written: before Python 3.11 `final` leaves no trace."""
    (written,) = ast.parse(inspect.getsource(kind)).body
    return {ast.unparse(decorator).partition("(")[0] for decorator in written.decorator_list}


def offered(name):
    """Return each candidate with the profile and machine it was offered for."""
    return [
        (candidate, found, host)
        for found, host in CASES
        for candidate in kind_of(name).candidates(found, host)
    ]


def test_there_are_techniques():
    assert len(NAMES) >= 13


@pytest.mark.parametrize("name", NAMES)
def test_the_class_is_named_after_its_file_and_the_family_after_its_folder(name):
    kind = kind_of(name)

    assert kind.__name__ == "".join(word.title() for word in name.split("_"))
    assert kind.family == kind.__module__.split(".")[-2]


@pytest.mark.parametrize("name", NAMES)
def test_it_is_a_final_frozen_record_with_defaults(name):
    kind = kind_of(name)

    assert kind.__bases__ == (Technique,)
    assert "final" in decorators_of(kind), "mark it with typing.final"
    assert kind.__dataclass_params__.frozen
    assert "__slots__" in vars(kind)
    assert all(field.kw_only for field in dataclasses.fields(kind))
    assert kind() == kind()


@pytest.mark.parametrize("name", NAMES)
def test_its_docstring_answers_the_four_questions(name):
    text = module_of(name).__doc__

    assert [heading for heading in HEADINGS if heading not in text] == []


@pytest.mark.parametrize("name", NAMES)
def test_it_promises_something_about_something(name):
    kind = kind_of(name)

    assert isinstance(kind.numerics, Numerics)
    assert isinstance(kind.moves_random_stream, bool)
    assert kind.addresses
    assert hook_points_of(kind), "it acts at no hook point"


@pytest.mark.parametrize("attribute", PLAIN)
def test_what_is_read_from_the_sources_is_what_the_classes_have(attribute):
    default = getattr(Technique, attribute, None)
    kinds = {name: getattr(kind_of(name), attribute) for name in NAMES}

    assert catalogue.declared(attribute) == {
        name: value for name, value in kinds.items() if value != default
    }


@pytest.mark.parametrize("name", NAMES)
def test_what_it_rescues_with_are_settings_it_takes(name):
    for rescue in kind_of(name).rescues:
        assert kind_of(name)(**rescue.settings)
        assert rescue.cost >= 0
        assert rescue.instead_of <= set(NAMES) - {name}


@pytest.mark.parametrize("name", NAMES)
def test_some_slow_training_is_offered_it(name):
    if "ranks" in kind_of(name).sets:
        pytest.skip("how many devices a training gets is the user's decision")
    assert offered(name)


@pytest.mark.parametrize("name", NAMES)
def test_candidates_differ_and_are_its_own(name):
    for found, host in CASES:
        candidates = list(kind_of(name).candidates(found, host))

        assert {type(candidate) for candidate in candidates} <= {kind_of(name)}
        assert len({str(candidate.settings()) for candidate in candidates}) == len(candidates)


@pytest.mark.parametrize("name", NAMES)
def test_it_predicts_a_gain_that_the_step_can_give(name):
    is_of_memory = bool(kind_of(name).addresses & OF_MEMORY)
    gains = []
    for candidate, found, host in offered(name):
        effect = candidate.predict(found, host)

        assert -found.step_ms.median < effect.step_ms
        gains.append(effect.peak_bytes < 0 or (effect.step_ms < 0 and not is_of_memory))
        assert effect.startup_s >= 0
        assert effect.why
    # Some may be predicted to be slower: they are tried last.
    assert any(gains) or not offered(name)


@pytest.mark.parametrize("name", NAMES)
def test_offers_and_predictions_repeat(name):
    first = [(c, c.predict(found, host)) for c, found, host in offered(name)]
    second = [(c, c.predict(found, host)) for c, found, host in offered(name)]

    assert first == second


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_without_facts_is_no_reason_to_fail(name):
    bare = dataclasses.replace(
        profile(phases=(0, 0, 1, 1, 0, 0)), loaders=(), models=(), optimizers=()
    )

    candidates = kind_of(name).candidates(bare, machine(cores=1))

    assert all(
        isinstance(candidate.predict(bare, machine(cores=1)).why, str) for candidate in candidates
    )


@pytest.mark.parametrize("name", NAMES)
def test_it_leaves_the_environment_it_is_given_alone(name):
    before = {"PATH": "/bin", "LD_PRELOAD": "/lib/a.so", "OMP_NUM_THREADS": "2"}

    for technique in [kind_of(name)(), *(candidate for candidate, _, _ in offered(name))]:
        after = applied(technique.environment, MappingProxyType(before))

        assert isinstance(after, Mapping)
        assert all(isinstance(x, str) for pair in after.items() for x in pair)
        assert after["PATH"] == "/bin"


@pytest.mark.parametrize("name", NAMES)
def test_it_leaves_the_loader_arguments_it_is_given_alone(name):
    known = inspect.signature(DataLoader.__init__).parameters
    defaults = {k: p.default for k, p in known.items() if k not in ("self", "dataset")}
    before = defaults | {"dataset": [1, 2, 3, 4], "batch_size": 2}

    for technique in [kind_of(name)(), *(candidate for candidate, _, _ in offered(name))]:
        after = applied(technique.loader, MappingProxyType(before))

        assert set(after) <= set(known)
        assert after["dataset"] is before["dataset"]
        assert after["batch_size"] == 2


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_file_brings_it_back_as_it_was(name, tmp_path):
    for technique in [kind_of(name)(), *(candidate for candidate, _, _ in offered(name))]:
        choice = Choice(technique=name, settings=technique.settings())
        write_recipe(Recipe(choices=(choice,)), tmp_path / "recipe.toml")

        (back,) = catalogue.build(read_recipe(tmp_path / "recipe.toml"))

        assert back == technique


@pytest.mark.parametrize("name", NAMES)
def test_its_settings_are_plain_and_none_is_called_name(name):
    settings = kind_of(name)().settings()

    assert json.loads(json.dumps(settings)) == settings
    assert "name" not in settings, "recipes use that key for the technique itself"


def applied(method, value):
    """Return what a hook point method gives; the value itself where there is nothing to do."""
    try:
        return method(value)
    except NotApplicable:
        return value
