"""Values are read later and stay the same; lines that need them at once get them at once."""

import copy
import io
import json
import math
import pickle
import subprocess
import sys
from contextlib import redirect_stdout

import pytest
import torch

from flatout.core.errors import NotApplicable
from flatout.core.readings import SyncPoint
from flatout.core.recipe import Choice, Recipe
from flatout.core.regime import Regime
from flatout.engine.late_output import LateOutput
from flatout.engine.late_reads import Late, LateReads
from flatout.techniques.compute import deferred_loss_reads
from flatout.techniques.compute.deferred_loss_reads import DeferredLossReads, begin
from flatout.workflow.recipes import write_recipe
from tests.techniques.facts import machine, profile
from tests.techniques.guarded import SCRIPTS, checked, played


@pytest.fixture
def reads(monkeypatch):
    """Return late reads of this process, taken back afterwards."""
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(torch.Tensor, "item", torch.Tensor.item)
    monkeypatch.setattr(torch.Tensor, "__format__", torch.Tensor.__format__)
    monkeypatch.setattr(deferred_loss_reads, "_READS", {})
    monkeypatch.setattr(deferred_loss_reads, "_UNDO", [])
    return begin()


def written(reads):
    return reads.output.stream.getvalue()


def test_a_line_is_printed_when_the_step_after_its_own_is_over(reads):
    loss = torch.tensor(1.25)

    with redirect_stdout(reads.output):
        print(f"loss {loss.item():.2f}")  # noqa: T201
        print("behind it")  # noqa: T201
    loss.fill_(7.0)  # the value is that of the moment it was read in

    reads.step()
    early = written(reads)
    reads.step()
    assert early in ("", "loss 1.25\nbehind it\n")  # a number on the CPU is there at once
    assert written(reads) == "loss 1.25\nbehind it\n"


def test_nothing_is_written_before_its_number_is_there(reads, monkeypatch):
    monkeypatch.setattr(Late, "is_there", lambda late: late._known)

    with redirect_stdout(reads.output):
        print(f"loss {torch.tensor(1.5).item()}", flush=True)  # noqa: T201
        print("behind it")  # noqa: T201
    reads.step()

    assert written(reads) == ""
    reads.step()
    assert written(reads) == "loss 1.5\nbehind it\n"


def test_a_running_sum_becomes_a_plain_float_where_it_is_returned(reads):
    def train(values):
        total, count = 0.0, 0
        for value in values:
            total += value.item() * 2
            count += 1
            reads.step()
        return total / count

    values = torch.tensor([0.1, 0.7, 1.3, 2.9])
    mean = train(values)

    expected = 0.0
    for value in values.tolist():
        expected += value * 2
    assert type(mean) is float
    assert mean == expected / 4
    assert sum(reads.late.values()) == 4


def test_an_accuracy_counted_in_whole_numbers_stays_whole(reads):
    right = 0
    for _ in range(3):
        right += (torch.arange(4) > 1).sum().item()
    with redirect_stdout(reads.output):
        print(f"{right / 12:.2f} of 12")  # noqa: T201

    reads.drain()
    assert written(reads) == "0.50 of 12\n"


def test_lines_that_need_the_value_get_it_and_are_named(reads):
    losses, best = [], 9.0
    loss = torch.tensor(0.5)

    losses.append(loss.item())
    if loss.item() < best:
        best = 0.5
    text = json.dumps({"loss": loss.item()})
    kept = loss.item()
    pair = (kept, 1)

    assert [type(value) for value in (losses[0], pair[0])] == [float, float]
    assert text == '{"loss": 0.5}'
    reasons = " ".join(reads.at_once.values())
    assert "hands it to losses.append()" in reasons
    assert "branches on it" in reasons
    assert not reads.late


def test_a_check_for_nan_reads_at_once(reads):
    def is_bad(loss):
        value = loss.item()
        return math.isnan(value)

    assert not is_bad(torch.tensor(0.5))
    assert not reads.late
    assert any("branches on it" in why for why in reads.at_once.values())


def test_what_asks_a_late_number_for_more_gets_the_plain_one():
    late = LateReads().send(torch.tensor(2.5))

    assert late == 2.5
    assert late > 2
    assert float(late) == 2.5
    assert [type(value) for value in (copy.deepcopy(late), pickle.loads(pickle.dumps(late)))] == [
        float,
        float,
    ]
    assert late.is_integer() is False
    assert repr(late) == "2.5"
    assert torch.equal(torch.ones(2) * late, torch.full((2,), 2.5))


def test_a_number_travels_to_the_host_whatever_the_script_s_default_device():
    loss = torch.tensor(2.5)

    with torch.device("meta"):
        late = LateReads().send(loss)

    assert late.value() == 2.5


def test_a_format_that_does_not_fit_fails_where_it_stands(reads):
    with redirect_stdout(reads.output), pytest.raises(ValueError, match="code 'd'"):
        print(f"{torch.tensor(1.5).item():d}")  # noqa: T201

    assert written(reads) == ""


def test_what_writes_to_the_output_itself_comes_behind_what_waits(monkeypatch):
    output = LateOutput(io.StringIO())
    late = LateReads(output).send(torch.tensor(1.0))
    monkeypatch.setattr(Late, "is_there", lambda late: late._known)

    output.write("a " + output.place(late, str) + "\n")

    assert output.getvalue() == "a 1.0\n"


def test_a_script_without_reads_is_told_so():
    deferred_loss_reads._READS.clear()
    assert DeferredLossReads().end() == ""

    deferred_loss_reads._READS["now"] = LateReads()
    with pytest.raises(NotApplicable, match="none is read"):
        DeferredLossReads().end()
    deferred_loss_reads._READS.clear()


def test_at_the_end_torchs_own_reads_and_the_output_are_back(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    before = torch.Tensor.item, torch.Tensor.__format__, sys.stdout
    DeferredLossReads().start()

    with pytest.raises(NotApplicable, match="none is read"):
        DeferredLossReads().end()

    assert (torch.Tensor.item, torch.Tensor.__format__, sys.stdout) == before


def waiting(what="item", ms=20.0, **changes):
    point = SyncPoint(line="train.py:9", what=what, per_step=1.0, ms_per_step=ms)
    return profile(kind="cuda", syncs=(point,), **changes)


def test_it_is_offered_where_a_gpu_is_waited_for():
    (found,) = DeferredLossReads.candidates(waiting(), machine())

    assert found.predict(waiting(), machine()).step_ms == -10.0
    assert DeferredLossReads.candidates(waiting(what="nonzero"), machine()) == ()
    assert DeferredLossReads.candidates(profile(), machine()) == ()


def test_it_is_hopeless_where_the_device_was_busy_while_it_was_waited_for():
    busy = Regime(name="gemm", shares={"sync": 0.002, "gemm": 0.9}, evidence=(), amdahl={})

    assert DeferredLossReads.candidates(waiting(regime=busy), machine()) == ()


@pytest.mark.slow
def test_an_unmodified_script_prints_the_same_lines_and_trains_the_same(tmp_path):
    write_recipe(
        Recipe(choices=(Choice(technique="deferred_loss_reads"),)), tmp_path / "recipe.toml"
    )
    script = SCRIPTS / "chatty.py"
    command = ["-m", "flatout", "run", "--with", tmp_path / "recipe.toml"]

    plain, late = (
        subprocess.run(
            [sys.executable, *start, script], capture_output=True, text=True, check=True
        ).stdout
        for start in ([], command)
    )

    trial, check = (
        played("chatty.py", "deferred_loss_reads"),
        checked("chatty.py", "deferred_loss_reads"),
    )
    assert late == plain
    (applied,) = trial.applied
    assert applied.status == "applied", applied
    assert applied.why.startswith("read late: chatty.py:")
    assert "branches on it" in applied.why
    assert check.status == "same", check


@pytest.mark.gpu
def test_a_value_on_a_gpu_is_printed_late_and_is_that_of_its_own_step(reads):
    loss = torch.zeros((), device="cuda")
    early = []

    with redirect_stdout(reads.output):
        for step in range(4):
            torch.cuda._sleep(500_000_000)  # a quarter second in which no number can arrive
            loss.fill_(step / 8)
            print(f"loss {loss.item():.3f}")  # noqa: T201
            early.append(written(reads))
            loss.fill_(7.0)  # the value is that of the moment it was read in
            reads.step()
    reads.drain()

    assert "0.375" not in early[3]
    assert written(reads) == "loss 0.000\nloss 0.125\nloss 0.250\nloss 0.375\n"
