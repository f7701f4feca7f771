"""`flatout run --record`: what a real training leaves, and what `compare` makes of two of them."""

import json
import textwrap

import pytest

from flatout.agent.status import METRIC
from flatout.cli import call
from flatout.records.errors import UserError
from flatout.records.trial_result import CurvePoint, PrintedValue, RunRecord, run_record_from_json
from flatout.workflow.compare import compare

SCRIPT = """
import logging, sys, time
import torch

logging.basicConfig(level=logging.INFO)
print("accuracy: 0.0 before anything was learned")
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
for step in range(40):
    x = torch.randn(16, 8)
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.05)
    if step % 10 == 9:
        print("step", step, "val loss", f"{loss.item():.4f},", "lr: 0.1", flush=True)
        logging.info({"eval_accuracy": step / 40})
if len(sys.argv) > 2:
    sys.exit(3)
"""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("train loss 2.41, val loss 2.53", [("train loss", "2.41"), ("val loss", "2.53")]),
        ("{'eval_loss': 0.693, 'lr': 0.5}", [("eval_loss", "0.693")]),
        ("Epoch 3 | acc@1=71.3% | lr 1e-3", [("acc@1", "71.3")]),
        ("Test set: Average loss: 0.0412, Accuracy: 9867/10000", [("loss", "0.0412")]),
        ("ppl = 1.2e+03", [("ppl", "1.2e+03")]),
        ("lossless 3 files, glossary 7, map_location=0", []),
        ("loss.py:12 failed, accuracy of v1.2.3", []),
    ],
)
def test_metrics_are_read_as_people_print_them(line, found):
    assert [(match["name"], match["value"]) for match in METRIC.finditer(line)] == found


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Two real runs of one script, the second with another rate and a failing end."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
    commands = {"a": ["0.05"], "b": ["0.1", "fail"]}
    codes = {
        name: call(
            ["run", "--record", str(folder / f"{name}.json"), str(folder / "train.py"), *arguments]
        )
        for name, arguments in commands.items()
    }
    return folder, codes


@pytest.mark.slow
@pytest.mark.smoke
def test_a_run_leaves_its_loss_over_time_and_what_it_printed(records):
    folder, codes = records

    record = run_record_from_json(json.loads((folder / "a.json").read_text()))

    assert codes == {"a": 0, "b": 3}
    assert record.recipe == "baseline"
    assert [value.step for value in record.printed["val_loss"]] == [10, 20, 30, 40]
    assert [value.value for value in record.printed["eval_accuracy"]] == [
        9 / 40,
        19 / 40,
        29 / 40,
        39 / 40,
    ]
    assert "accuracy" not in record.printed  # printed before the first step
    assert record.points[-1].step == 40
    assert record.ms_per_step >= 50  # the script sleeps for as long


@pytest.mark.slow
def test_two_runs_are_compared_and_a_failed_one_is_named(records, capsys):
    folder, _ = records

    assert call(["compare", str(folder / "a.json"), str(folder / "b.json")]) == 0

    out = " ".join(capsys.readouterr().out.split())
    assert "time per step" in out
    assert "val_loss, last" in out
    assert "time to eval_accuracy 0.975" in out
    assert "the candidate ended with exit code 3" in out


def run_of(losses, *, ms=100.0, accuracy=(0.5, 0.9)):
    """Return a record of a hundred steps for each loss."""
    points = [
        CurvePoint(step=100 * n, s=0.1 * ms * n, samples=0, loss=x) for n, x in enumerate(losses)
    ]
    printed = [PrintedValue(step=n, s=10.0 * (n + 1), value=x) for n, x in enumerate(accuracy)]
    record = RunRecord(
        command="train.py",
        recipe="",
        exit_code=0,
        seconds=ms,
        points=tuple(points),
        printed={"val_accuracy": tuple(printed)},
    )
    return record.to_json()


def test_a_loss_within_its_scatter_is_said_to_be_so_and_a_higher_one_not():
    scattered = [1.0 + 0.01 * (-1) ** n for n in range(100)]
    worse = [loss + 0.1 for loss in scattered]

    same = compare(run_of(scattered), run_of(scattered[::-1], ms=50.0))
    higher = compare(run_of(scattered), run_of(worse))

    assert same.ratio == pytest.approx(2.0)
    assert any("is within what its points scatter" in note for note in same.notes)
    assert any("+0.1, which is more than what its points scatter" in note for note in higher.notes)


def test_the_time_to_the_baselines_last_value_is_that_of_the_first_time():
    found = compare(run_of([1.0] * 20), run_of([1.0] * 20, accuracy=(0.91, 0.95)))

    [reached] = [one for one in found.quantities if one.name == "time to val_accuracy 0.9"]
    assert (reached.baseline, reached.candidate) == (20.0, 10.0)


def test_a_run_that_hardly_trained_is_refused():
    with pytest.raises(UserError, match="too few steps"):
        compare(run_of([1.0]), run_of([1.0] * 20))


def test_a_place_that_cannot_be_written_is_named_before_the_script_runs(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("open('ran', 'w')")

    assert call(["run", "--record", f"{script}/a.json", str(script)]) == 2
    assert not (tmp_path / "ran").exists()
