"""Which way workers start, from facts that are made up."""

import io
import multiprocessing
import zipfile
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from flatout.agent.worker_start import (
    StartFacts,
    choose_start,
    name_of,
    start_of,
    start_reason,
    start_with,
)
from flatout.records.errors import NotApplicable
from tests.techniques.data.samples import Numbers

LOCAL = "dataset: it is local"


@pytest.fixture
def spawning():
    """Let the process start others by spawn, as it does by default on macOS and Windows."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


def local_numbers():
    numbers = Numbers()
    numbers.transform = lambda x: x
    return numbers


@pytest.mark.parametrize(
    "facts",
    [
        {"usual": "fork"},
        {"usual": "forkserver"},
        {"usual": "fork", "is_cuda_in_use": True},
        {"usual": "spawn", "trouble": LOCAL, "has_workers": True},
        {"usual": "fork", "cuda_holder": "dataset.rows", "has_workers": True},
        {"usual": "spawn", "asked": "fork", "cuda_holder": "dataset.rows", "is_cuda_in_use": True},
    ],
)
def test_a_method_that_works_or_was_chosen_is_kept(facts):
    start = choose_start(StartFacts(**facts))

    assert (start.method, start.because) == (facts.get("asked", facts["usual"]), "")


@pytest.mark.parametrize("usual", ["spawn", "forkserver"])
def test_workers_that_cannot_begin_afresh_are_forked(usual):
    start = choose_start(StartFacts(usual=usual, trouble=LOCAL))

    assert start.method == "fork"
    assert start.because == f"flatout forks them instead of {usual}: {LOCAL}"


@pytest.mark.parametrize(
    ("facts", "advice"),
    [
        ({"can_fork": False}, "this system does not fork safely"),
        ({"is_cuda_in_use": True}, 'multiprocessing_context="fork" if none of them does'),
        ({"asked": "spawn"}, "the script chose spawn for this loader itself"),
    ],
)
def test_where_no_way_is_left_the_text_says_what_to_do(facts, advice):
    with pytest.raises(NotApplicable, match=f"spawned here, and {LOCAL}; .*{advice}"):
        choose_start(StartFacts(usual="spawn", trouble=LOCAL, **facts))


def test_a_data_set_on_cuda_gets_no_workers():
    with pytest.raises(NotApplicable, match=r"dataset\.rows is on CUDA: .* on the host"):
        choose_start(StartFacts(cuda_holder="dataset.rows", is_cuda_in_use=True))


def test_an_open_file_is_not_shared_by_forked_workers(spawning):
    numbers = Numbers()
    with (
        Path(__file__).open("rb") as numbers.file,
        pytest.raises(NotApplicable, match="in each worker"),
    ):
        start_with({"dataset": numbers, "num_workers": 0})


def test_nor_is_it_where_fork_is_the_usual_method(tmp_path):
    numbers = Numbers()
    asked = {"dataset": numbers, "num_workers": 0, "multiprocessing_context": "fork"}
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as numbers.archive:
        numbers.archive.writestr("a", "text")

    with (
        zipfile.ZipFile(tmp_path / "a.zip") as numbers.archive,
        pytest.raises(NotApplicable, match=r"dataset\.archive\.fp is an open file.*each worker"),
    ):
        start_with(asked)
    assert start_with(asked) == asked  # closed by now


def test_files_in_memory_files_of_output_and_a_script_s_own_workers_are_in_no_way(tmp_path):
    numbers = Numbers()
    numbers.memory = io.BytesIO(b"text")
    with (tmp_path / "log").open("w") as numbers.log:
        assert start_with({"dataset": numbers, "num_workers": 0}).keys() >= {"dataset"}
    with Path(__file__).open("rb") as numbers.file:
        assert start_with({"dataset": numbers, "num_workers": 1})["num_workers"] == 1


def test_the_reason_travels_with_the_loader_and_its_batches_are_the_script_s(spawning):
    asked = {"dataset": local_numbers(), "batch_size": 5, "shuffle": True}
    torch.manual_seed(0)
    plain = [batch.tolist() for batch in DataLoader(**asked)]

    torch.manual_seed(0)
    loader = DataLoader(**start_with(asked | {"num_workers": 0}) | {"num_workers": 2})
    reason = start_reason(loader.multiprocessing_context)

    assert [batch.tolist() for batch in loader] == plain
    assert reason.startswith("flatout forks them instead of spawn: dataset: ")
    assert start_reason(multiprocessing.get_context("fork")) == (
        "the script chose it for this loader"
    )


def test_a_built_loader_is_given_the_context_it_needs(spawning):
    assert start_of(DataLoader(Numbers())) is None
    assert name_of(start_of(DataLoader(local_numbers()))) == "fork"
