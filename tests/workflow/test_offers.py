"""Every technique for speed is offered on what a tuning knows, and is not offered to everybody."""

from dataclasses import replace

import pytest

from flatout.records import catalogue
from flatout.records.technique import Numerics
from flatout.tuning.extra_profiling import Looks, wanted_probes
from flatout.tuning.ranking import Search
from tests.test_contract import CASES

BY_THE_USER = ("data_parallel",)
"""How many processes train is the user's decision: `flatout run --gpus`, no tuning offers it."""
NAMES = [name for name in catalogue.names() if name not in BY_THE_USER]
BY_FEEDING = ("data",)
"""Families for which `tune` tries what a sample costs."""


def as_tuned(found, host, name):
    """Return the profile as a tuning for this one technique would have it.

    The timed steps bring what they bring; of the rest there is what the technique makes it look
    for."""
    timed = replace(
        found, syncs=(), memory=None, journey=None, pipeline=None, limits=None, worker_scan=None
    )
    search = Search(machine=host, ceiling=Numerics.TRAINING, only=(name,))
    wanted = wanted_probes(search, timed)
    looks = Looks(
        pipeline=found.pipeline if catalogue.technique_class(name).family in BY_FEEDING else None,
        journey=found.journey if "journey" in wanted else None,
        memory=found.memory if "memory" in wanted else None,
        operators=found.trace if "operator_times" in wanted else None,
    )
    return looks.added_to(timed, ())


def offers(name):
    kind = catalogue.technique_class(name)
    return [bool(kind.candidates(as_tuned(found, host, name), host)) for found, host in CASES]


@pytest.fixture(autouse=True)
def packed_store(tmp_path, monkeypatch):
    """Name a packed store, as the user does who packed the data."""
    import numpy as np

    from tests.data.packs import packed

    np.save(tmp_path / "numbers.npy", np.arange(100))
    packed(tmp_path / "numbers.npy", tmp_path / "numbers")
    monkeypatch.setenv("FLATOUT_PACKED", str(tmp_path / "numbers"))


@pytest.mark.parametrize("name", NAMES)
def test_a_tuning_of_this_technique_alone_learns_what_it_is_offered_on(name):
    assert any(offers(name))


@pytest.mark.parametrize("name", NAMES)
def test_some_training_is_not_offered_it(name):
    fast, host = CASES[0]
    nothing = replace(
        fast,
        loaders=(),
        models=(),
        optimizers=(),
        cpu_threads=host.usable_cores,
        collection_ms_per_step=0.0,
    )
    kind = catalogue.technique_class(name)

    assert not all(offers(name)) or not kind.candidates(as_tuned(nothing, host, name), host)
