import sys

import pytest

from flatout.hardware.peaks import ask_module


def ask(module, *words, limit_s=60.0, job=None):
    return ask_module(sys.executable, module, words, job=job, limit_s=limit_s)


def test_the_last_line_is_the_answer():
    assert ask("json.tool", "--compact", job={"a": [1]}) == {"a": [1]}


def test_a_module_that_fails_says_why_in_its_own_words():
    with pytest.raises(ValueError, match=r"measuring failed: .*No module named flatout\.nowhere"):
        ask("flatout.nowhere")


def test_a_module_that_takes_too_long_is_ended():
    with pytest.raises(ValueError, match="measuring took over 1 s"):
        ask("http.server", "0", limit_s=1.0)


@pytest.mark.parametrize("search", [None, "", "."])
def test_nothing_in_the_current_folder_runs(monkeypatch, tmp_path, search):
    (tmp_path / "json.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    if search is not None:
        monkeypatch.setenv("PYTHONPATH", f"{search}:/nowhere")

    assert ask("json.tool", "--compact", job=[1]) == [1]
    assert not (tmp_path / "ran").exists()
