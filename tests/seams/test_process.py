"""How a child process is set up, without starting one."""

from pathlib import Path

from flatout.seams.process import not_journaled


def test_tritons_own_cache_is_kept_from_trial_to_trial():
    assert str(Path.home() / ".triton") in not_journaled({})
    assert "/data/.triton" in not_journaled({"TRITON_HOME": "/data"})
