"""Scripts of odd habits, each of which flatout once got wrong or misleading."""

import shutil
from pathlib import Path

import pytest

from flatout.core.errors import UserError
from flatout.workflow.memory_trace import TraceRequest, trace_memory

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder, where a script is put beside nothing."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(folder, *names):
    for name in names:
        shutil.copy(SCRIPTS / name, folder)


def test_a_plan_takes_the_batch_of_the_training_and_not_of_the_evaluation(folder):
    put(folder, "short_epochs.py")

    stream = trace_memory("short_epochs.py")

    assert (stream.batch, stream.steps) == (96, 1)


def test_a_batch_of_more_than_the_data_set_is_told_as_that(folder):
    put(folder, "short_epochs.py")

    with pytest.raises(UserError, match="only 96 samples, which make no batch of 1000"):
        trace_memory("short_epochs.py", request=TraceRequest(batch=1000))
