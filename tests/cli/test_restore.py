"""The verb `restore`, from a folder alone."""

import subprocess

from flatout.cli import call
from tests.agent.test_undo_journal import command, filled, listing


def test_originals_come_back_and_the_exit_code_says_so(tmp_path, capsys):
    work = filled(tmp_path)
    before = listing(work)
    (tmp_path / "trial").mkdir()
    body = "os.remove('model.pt'); shutil.rmtree('out')"
    subprocess.run(command(tmp_path, body), cwd=work, check=True)

    code = call(["restore", str(work)])

    assert code == 0
    assert listing(work) == before
    assert capsys.readouterr().out == f"2 changes undone in {work}\n"


def test_what_lies_outside_is_named_and_is_an_error(tmp_path, capsys):
    work = filled(tmp_path)
    (tmp_path / "trial").mkdir()
    subprocess.run(command(tmp_path, "os.remove('model.pt')"), cwd=work, check=True)
    work = work.rename(tmp_path / "elsewhere")

    assert call(["restore", str(work)]) == 1
    assert "is not in the folders of the trial, and was left alone" in capsys.readouterr().out
    assert call(["restore", "--was", str(tmp_path / "work"), str(work)]) == 0
    assert (work / "model.pt").read_text() == "the user's model.pt"
