"""A training that is wrong as it is written is not tuned before someone says so."""

from dataclasses import replace

import pytest

from flatout.cli import call
from flatout.records.errors import UserError
from flatout.records.trial import Outcome, Trial, Workload
from flatout.rules import source
from flatout.workflow.tune import TuneOptions, tune
from tests.rules.rank_facts import rank
from tests.workflow.test_tune import MACHINE, profile

ADDING_UP = """\
import torch
for x in loader:
    loss = model(x).sum()
    loss.backward()
    optimizer.step(){comment}
"""
SAME_ORDER = """\
import torch
from torch.utils.data import DataLoader, DistributedSampler
loader = DataLoader(data, sampler=DistributedSampler(data))
for epoch in range(3):
    for x in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
"""


class RanError(Exception):
    """A trial was asked for."""


def run(folder, text, *, ranks=None, **options):
    """Tune a script; the first trial ends it, or shows ranks and the second ends it."""
    answers = [] if ranks is None else [replace(profile(100.0), ranks=ranks)]

    def runner(workload, recipe, machine, trial_options):
        if not answers:
            raise RanError
        return Trial(recipe=recipe, outcome=Outcome.OK, profile=answers.pop(), wall_s=1)

    (folder / "train.py").write_text(text)
    workload = Workload(target="train.py", folder=folder, python="python")
    given = TuneOptions(out=folder / "out", runner=runner, wait=lambda _most_s: None, **options)
    return tune(workload, given, lambda _progress: None, MACHINE)


def test_one_line_names_place_code_page_and_what_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(ADDING_UP.format(comment=""))

    assert call(["tune", "train.py"]) == 2

    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == (
        "flatout: train.py:5: LP03: no step clears the gradients: each one adds to those of all "
        "steps before; tuned, it would only be wrong sooner: 'flatout rules LP03' says how to fix "
        "it, --acknowledge LP03 tunes it as it is\n"
    )
    assert not (tmp_path / "flatout-out").exists()


@pytest.mark.parametrize(
    ("comment", "settings", "acknowledged"),
    [
        ("", "", ("LP03",)),
        ("  # flatout: ignore[LP03]", "", ()),
        ("", '[tool.flatout.check]\nignore = ["LP03"]\n', ()),
        ("", "no table", ()),
    ],
    ids=["option", "comment", "pyproject", "unreadable pyproject"],
)
def test_what_is_acknowledged_is_tuned(tmp_path, comment, settings, acknowledged):
    (tmp_path / "pyproject.toml").write_text(settings)

    with pytest.raises(RanError):
        run(tmp_path, ADDING_UP.format(comment=comment), acknowledged=acknowledged)


def test_a_code_that_ends_no_tuning_cannot_be_acknowledged(tmp_path):
    with pytest.raises(UserError, match="unknown code 'LP3'; did you mean 'LP03'"):
        run(tmp_path, ADDING_UP, acknowledged=("LP3",))


def test_what_is_wrong_on_several_ranks_alone_ends_a_tuning_that_has_them(tmp_path):
    with pytest.raises(UserError, match=r"train.py:3: DS04: .* --acknowledge DS04 "):
        run(tmp_path, SAME_ORDER, ranks=(rank(0), rank(1)))
    with pytest.raises(RanError):
        run(tmp_path, SAME_ORDER, ranks=())
    with pytest.raises(RanError):
        run(tmp_path, SAME_ORDER, ranks=(rank(0), rank(1)), acknowledged=("DS04",))


def test_a_script_behind_its_launcher_is_read(tmp_path):
    (tmp_path / "train.py").write_text(ADDING_UP.format(comment=""))
    launched = Workload(
        target="-m torch.distributed.run", arguments=("train.py",), folder=tmp_path, python="python"
    )

    with pytest.raises(UserError, match=r"train.py:5: LP03"):
        tune(launched, TuneOptions(out=tmp_path / "out"), lambda _progress: None, MACHINE)


def test_few_rules_end_a_tuning():
    early = source.codes_of_wrong_training(of_ranks=False)

    assert early == {"AMP03", "LP03", "LP09"}
    assert source.codes_of_wrong_training(of_ranks=True) == {"DS04", "DS09"}
