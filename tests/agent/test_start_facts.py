"""What can be sent to a fresh worker, and which lines one would run again."""

import multiprocessing
import subprocess
import sys
from collections.abc import Mapping
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

from flatout.agent import worker_start as facts_module
from flatout.agent.worker_start import find_cuda, find_pickle_trouble, find_trouble, start_facts
from tests.techniques.data.samples import Numbers

PROGRAM = """
from flatout.agent.worker_start import find_pickle_trouble, find_repeated_line

class Outside: pass

def show():
    print(find_repeated_line() or "none", end=";")

{guard}:
    class Inside: pass
    show()
    print(find_pickle_trouble([Outside()]) or "none", end=";")
    print(find_pickle_trouble([Inside()]) or "none", end=";")
{rest}
"""


class Counted(Numbers):
    """Shares a counter and a lock with its workers."""

    def __init__(self):
        super().__init__()
        self.count = multiprocessing.get_context("spawn").Value("i", 0)

    def __getitem__(self, index):
        with self.count.get_lock():
            self.count.value += 1
        return torch.tensor(index)


def with_attribute(value):
    numbers = Numbers()
    numbers.extra = value
    return numbers


def printed(folder, guard, rest="", *, as_module=False):
    (folder / "program.py").write_text(PROGRAM.format(guard=guard, rest=rest))
    target = ["-m", "program"] if as_module else ["program.py"]
    command = [sys.executable, *target]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip(";\n").split(";")


@pytest.mark.parametrize("as_module", [False, True])
@pytest.mark.parametrize("more", ["", " and True"])
def test_what_is_below_the_main_guard_does_not_run_again(tmp_path, more, as_module):
    found = printed(tmp_path, f'if __name__ == "__main__"{more}', as_module=as_module)

    assert found == ["none", "none", "Inside is made where a fresh worker does not come by"]


def test_what_is_beside_the_main_guard_runs_again(tmp_path):
    assert printed(tmp_path, "if True")[0] == "line 11 of program.py"
    assert printed(tmp_path, 'if __name__ == "__main__"', "show()")[-1] == "line 14 of program.py"


def test_what_a_prompt_is_given_is_found_in_no_fresh_worker():
    source = PROGRAM.format(guard="if True", rest="")
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert done.stdout.split(";")[:2] == [
        "none",
        "Outside is made where a fresh worker does not come by",
    ]


def test_a_script_from_a_pipe_can_be_read_once_only():
    source = "from flatout.agent.worker_start import find_trouble; print(find_trouble({}))"
    done = subprocess.run([sys.executable], input=source, capture_output=True, text=True)

    assert done.stdout.startswith("the script comes from <stdin>")


@pytest.mark.parametrize(
    "value", [lambda x: x, (n for n in ()), partial(print, file=sys.stdout)], ids=type
)
def test_what_cannot_be_pickled_is_told_with_the_error(value):
    assert ": " in find_pickle_trouble(with_attribute(value))


@pytest.mark.parametrize("value", [torch.ones(3), np.ones(3), partial(print, 1), Numbers])
def test_what_can_be_pickled_is_no_trouble(value):
    assert find_pickle_trouble(with_attribute(value)) == ""


def test_an_array_of_objects_is_looked_into():
    objects = np.array([lambda x: x], dtype=object)

    assert "pickle" in find_pickle_trouble(with_attribute(objects))


def test_a_shared_counter_can_be_sent_as_a_real_worker_shows():
    counted = Counted()

    assert find_pickle_trouble(counted) == ""
    list(DataLoader(counted, num_workers=1, multiprocessing_context="spawn"))
    assert counted.count.value == len(counted)


def test_a_tensor_is_not_moved_to_shared_memory_by_the_look():
    numbers = with_attribute(torch.ones(8))

    find_pickle_trouble(numbers)

    assert not numbers.extra.is_shared()


class OnCuda(torch.Tensor):
    """Says that it lies on a device that is not here."""

    is_cuda = True


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 2))
        self.layers[0].weight.__class__ = OnCudaWeight


class OnCudaWeight(torch.nn.Parameter):
    is_cuda = True


class Opened(Mapping):
    """Reads a file for each key, as numpy's archives do."""

    def __getitem__(self, key):
        raise AssertionError("it was read")

    def __iter__(self):
        return iter("ab")

    def __len__(self):
        return 2


def test_cuda_is_found_where_a_data_set_holds_it():
    held = with_attribute({"rows": [torch.ones(2).as_subclass(OnCuda)]})

    assert find_cuda({"dataset": held, "collate_fn": None}) == "dataset.extra.rows.0"
    assert find_cuda({"dataset": with_attribute(torch.ones(2))}) == ""


def test_cuda_is_found_in_a_model_below_a_part_of_a_data_set():
    assert find_cuda({"dataset": Subset(with_attribute(Encoder()), [0])}) == "dataset.dataset.extra"


@pytest.mark.parametrize("value", ["cuda:1", torch.device("cuda", 0), Opened()], ids=type)
def test_a_device_s_name_and_what_lies_in_files_hold_no_cuda(value):
    assert find_cuda({"dataset": with_attribute(value)}) == ""


class Emptied(Numbers):
    """Takes out of itself what cannot be sent, as some data sets do."""

    def __getstate__(self):
        state = self.__dict__
        state["opened"] = None
        return state


def test_a_data_set_that_empties_itself_to_be_sent_is_as_it_was():
    emptied = Emptied()
    emptied.opened = opened = object()

    assert find_trouble({"dataset": emptied}) == ""
    assert emptied.opened is opened


def test_the_data_set_is_pickled_only_where_a_fresh_worker_may_start(monkeypatch):
    asked = {"dataset": with_attribute(lambda x: x), "num_workers": 0}
    spawned = asked | {"multiprocessing_context": "spawn"}
    monkeypatch.setattr(facts_module, "start_method", lambda: "fork")

    assert start_facts(asked).trouble == ""
    assert start_facts(spawned).trouble.startswith("dataset: ")
    assert start_facts(spawned | {"num_workers": 1}).trouble == ""


def test_cuda_is_looked_for_once_it_is_in_use(monkeypatch):
    asked = {"dataset": with_attribute(torch.ones(2).as_subclass(OnCuda)), "num_workers": 0}
    monkeypatch.setattr(facts_module, "start_method", lambda: "fork")
    assert start_facts(asked).cuda_holder == ""

    monkeypatch.setattr(facts_module, "is_cuda_in_use", lambda: True)

    assert start_facts(asked).cuda_holder == "dataset.extra"


def test_macos_does_not_fork_safely(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")

    assert not facts_module.can_fork()
