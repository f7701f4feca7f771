"""Processes that make batches beside this one: they work, and they end."""

import os
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from flatout.agent.measuring.batch_making import MOST, Company
from tests.left_behind import left_behind, left_since


class Signed(Dataset):
    """Leaves a file named after the process that asks for a sample."""

    def __init__(self, folder, *, fails=False):
        self.folder, self.fails = folder, fails

    def __len__(self):
        return 8

    def __getitem__(self, index):
        (self.folder / str(os.getpid())).touch()
        if self.fails:
            raise OSError("no such sample")
        return torch.ones(4)


def signed(folder, count):
    ends_at = time.monotonic() + 30
    while time.monotonic() < ends_at:
        names = {path.name for path in folder.iterdir()}
        if len(names) >= count:
            return names
        time.sleep(0.02)
    raise AssertionError("nobody made a sample")


def test_they_make_samples_until_they_are_ended(tmp_path):
    before = left_behind()
    company = Company(2)

    company.start(DataLoader(Signed(tmp_path), 4, shuffle=True))
    company.start(DataLoader(Signed(tmp_path), 4))
    names = signed(tmp_path, 2)

    assert len(names) == 2
    assert str(os.getpid()) not in names
    assert all(process.is_alive() for process in company.processes)
    company.end()
    assert left_since(before) == set()


def test_what_they_made_and_what_it_took_is_counted(tmp_path):
    company = Company(2)
    assert company.made == (0, 0.0)

    company.start(DataLoader(Signed(tmp_path), 4, shuffle=True))
    ends_at = time.monotonic() + 30
    while company.made[0] < 40 and time.monotonic() < ends_at:
        time.sleep(0.02)
    company.end()
    samples, cpu_s = company.made

    assert samples >= 40
    assert samples % 4 == 0
    assert 0 < cpu_s < 60


def test_samples_that_fail_end_the_process_without_a_word(tmp_path, capfd):
    before = left_behind()
    company = Company(1)
    company.start(DataLoader(Signed(tmp_path, fails=True), 4))
    signed(tmp_path, 1)
    company.processes[0].join(30)

    assert not company.processes[0].is_alive()
    company.end()
    assert left_since(before) == set()
    assert capfd.readouterr().err == ""


def test_the_random_stream_of_the_training_stays_where_it_was(tmp_path):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    company = Company(1)
    company.start(DataLoader(Signed(tmp_path), 4, shuffle=True))
    signed(tmp_path, 1)
    company.end()

    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(("asked", "made"), [(0, 0), (200, MOST)])
def test_not_more_than_what_shows(asked, made):
    assert Company(asked).number == made
