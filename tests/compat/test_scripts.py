"""Scripts in the styles people publish, run as they are: measured, tuned a little, and trained."""

import functools
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import flatout
from flatout.hardware.machine import read_machine
from flatout.records.ablation import ablation_from_json
from flatout.records.profile import Bound
from flatout.records.recipe import Choice
from flatout.records.technique import Effect, Numerics
from flatout.records.trial import Outcome, Workload
from flatout.tuning import ladder
from flatout.tuning.ranking import Candidate
from flatout.tuning.state import TuningState
from flatout.tuning.trials import run_trial
from flatout.workflow import tune as tuning
from flatout.workflow.measure import measure
from flatout.workflow.recipe_files import read_recipe
from flatout.workflow.run import run
from tests.paths import ROOT

pytestmark = pytest.mark.slow

SCRIPTS = ROOT / "tests/scripts/public"
LOSS_BAND = 0.05
"""bf16 against fp32 over some tens of steps of these small models: at most 1 % was seen."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """One script and what flatout has to find in it."""

    name: str
    short: str
    """Arguments for a training to the end that takes a second."""
    needs: tuple[str, ...] = ()
    backwards: int = 1
    samples: int
    epoch_steps: int
    built_in: str
    """Function of the script or framework that builds the training loader."""
    root: str
    saves: tuple[str, ...]
    autocast: str = "applied"
    """What becomes of bf16_autocast."""

    def __str__(self):
        return self.name


ALL = [
    Script(
        name="plain_epochs",
        short="--epochs 2 --dropout 0",
        samples=16,
        epoch_steps=16,
        built_in="plain_epochs.py:main<",
        root="Net",
        saves=("best.pt",),
    ),
    Script(
        name="gradient_accumulation_amp",
        short="--epochs 2 --dropout 0",
        backwards=2,
        samples=16,
        epoch_steps=6,
        built_in="gradient_accumulation_amp.py:main<",
        root="CharModel",
        saves=("last.pt",),
        autocast="the script runs the model under autocast itself",
    ),
    Script(
        name="hf_trainer",
        short="--epochs 2 --dropout 0",
        needs=("transformers", "accelerate"),
        backwards=2,
        samples=16,
        epoch_steps=12,
        built_in="trainer.py:get_train_dataloader<",
        root="GPT2LMHeadModel",
        saves=("final/model.safetensors", "checkpoint-24/trainer_state.json"),
    ),
    Script(
        name="accelerate_loop",
        short="--num-epochs 2 --dropout 0 --cpu",
        needs=("transformers", "accelerate"),
        backwards=2,
        samples=16,
        epoch_steps=16,
        built_in="accelerate_loop.py:training_function<",
        root="BertForSequenceClassification",
        saves=("state/model.safetensors", "state/optimizer.bin"),
    ),
    Script(
        name="lightning_module",
        short="--max-epochs 2 --dropout 0",
        needs=("lightning",),
        samples=16,
        epoch_steps=16,
        built_in="lightning_module.py:train_dataloader<",
        root="AutoEncoder",
        saves=("lightning_logs/version_0/metrics.csv", "lightning_logs/version_0/checkpoints"),
    ),
]


@pytest.fixture(params=ALL, ids=str)
def script(request):
    missing = [name for name in request.param.needs if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: pip install flatout[frameworks]")
    return request.param


@functools.cache
def machine():
    return read_machine(torch=False)


def workload_of(script, arguments=""):
    """Return the script as a workload in a folder of its own, beside which nothing lies."""
    folder = Path(tempfile.mkdtemp(prefix="flatout-compat-"))
    shutil.copy(SCRIPTS / f"{script.name}.py", folder)
    return Workload(
        target=f"{script.name}.py",
        arguments=tuple(arguments.split()),
        folder=folder,
        python=sys.executable,
    )


@functools.cache
def measured(script):
    workload = workload_of(script)
    trial = measure(workload, limit_s=120.0, machine=machine())
    left = sorted(path.name for path in workload.folder.iterdir())
    shutil.rmtree(workload.folder)
    return trial, left


def profile_of(script):
    trial, _ = measured(script)
    assert trial.outcome is Outcome.OK, trial.message + trial.traceback
    return trial.profile


def test_measure_gives_phases_that_add_up(script):
    profile = profile_of(script)

    assert sum(profile.phases_ms.values()) == pytest.approx(profile.step_ms.median)
    assert min(profile.phases_ms[name] for name in ("forward", "backward", "optimizer")) > 0


def test_measure_leaves_the_folder_as_it_was(script):
    trial, left = measured(script)

    assert trial.details["errors"] == []
    assert trial.changed_files == ()
    assert left == [f"{script.name}.py"]


def test_measure_finds_the_one_training_loader(script):
    loaders = profile_of(script).training_loaders

    assert len(loaders) == 1
    assert script.built_in in loaders[0].address
    assert loaders[0].batches_drawn > 0


def test_measure_counts_steps_as_the_script_does(script):
    profile = profile_of(script)

    assert profile.backwards_per_step == script.backwards
    assert profile.samples_per_step == pytest.approx(script.samples, rel=0.1)
    assert profile.epoch_steps == script.epoch_steps


def test_measure_keeps_evaluation_and_saving_out(script):
    profile = profile_of(script)

    assert profile.models[0].calls_per_step == script.backwards
    assert not any("all count" in note for note in profile.notes)


def test_measure_finds_model_and_optimizer(script):
    profile = profile_of(script)

    assert [model.name for model in profile.models] == [script.root]
    assert profile.optimizers[0].parameters == profile.models[0].parameters


WORKERS = Candidate(
    choice=Choice(technique="loader_workers", settings={"num_workers": 1}),
    numerics=Numerics.EXACT,
    effect=Effect(why="every script here has a loader without workers"),
    ratio=1.5,
    bound=Bound(ratio=float("inf"), share=1.0, why="this can be tried anywhere"),
)
"""What is predicted for these tiny models depends on the machine; this can be tried on each."""


class OnePair:
    """Runs trials of half a second, and says when there is no time for more of them.

    These tests look at the structure, never at the times.
    """

    def __init__(self):
        self.tried = 0

    def run(self, workload, recipe, machine, options):
        self.tried += WORKERS.choice in recipe.choices
        return run_trial(workload, recipe, machine, replace(options, measure_s=0.5))

    def now(self):
        return 1000.0 * bool(self.tried)


def test_tune_tries_techniques_and_breaks_nothing(script, tmp_path, monkeypatch):
    # One pair of one technique, at any cost, and no more: what is measured here decides nothing.
    monkeypatch.setattr(TuningState, "has_time", lambda self, **_: not self.rows)
    monkeypatch.setattr(ladder, "rank", lambda *_: [WORKERS])
    # On a busy machine a scan may see that workers and fewer threads help together.
    monkeypatch.setattr(ladder, "find_pair", lambda *_: [])
    workload = workload_of(script)
    events, trials = [], OnePair()

    ablation = tuning.tune(
        workload,
        tuning.TuneOptions(
            out=tmp_path,
            budget_s=600.0,
            accepts_load=True,
            confirm_pairs=1,
            runner=trials.run,
            clock=trials.now,
        ),
        events.append,
        machine(),
    )

    assert ablation.stopped in ("finished", "budget")
    assert [row.choice for row in ablation.rows] == [WORKERS.choice]
    assert [row.why for row in ablation.rows if row.verdict.value in ("failed", "rejected")] == []
    assert ablation_from_json(json.loads(json.dumps(ablation.to_json()))).rows == ablation.rows
    assert [path.name for path in workload.folder.iterdir()] == [workload.target]
    assert events


RECIPE = """
[flatout]
version = "{version}"

[[technique]]
name = "bf16_autocast"

[[technique]]
name = "loader_workers"
num_workers = 2

[[technique]]
name = "fused_optimizer"
"""


def losses_in(folder):
    return json.loads((folder / "output/losses.json").read_text())


def test_run_trains_to_the_end_as_the_script_does(script, tmp_path, capfd):
    plain = workload_of(script, script.short)
    faster = workload_of(script, script.short)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(version=flatout.__version__))

    subprocess.run(
        [sys.executable, plain.target, *plain.arguments],
        cwd=plain.folder,
        capture_output=True,
        check=True,
    )
    code = run(faster, read_recipe(recipe))

    assert code == 0
    assert [name for name in script.saves if not (faster.folder / "output" / name).exists()] == []
    assert losses_in(faster.folder) == pytest.approx(losses_in(plain.folder), rel=LOSS_BAND)
    said = capfd.readouterr().err
    assert "fused_optimizer was not applied" not in said
    assert "loader_workers was not applied" not in said
    assert ("bf16_autocast was not applied" in said) == (script.autocast != "applied")
