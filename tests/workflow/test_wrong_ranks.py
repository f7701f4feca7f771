"""What two real ranks and a real compiler leave in a profile, and what the rules say of it."""

import sys

import pytest

from flatout import rules
from flatout.records.errors import UserError
from flatout.records.recipe import Recipe
from flatout.records.trial import Outcome, Workload
from flatout.tuning.trials import TrialOptions, run_trial
from flatout.workflow.tune import TuneOptions, tune
from tests.support.programs import workload_of
from tests.support.trial_runs import machine

pytestmark = pytest.mark.slow

RANKS = """\
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
loader = DataLoader(data, 16, {sampling})
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1){more})
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
for epoch in range(400):
    {epoch}
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
"""
SPLIT = "sampler=DistributedSampler(data)"
COMPILED = """\
import torch
model = torch.nn.Linear(8, 1)
@torch.compile(backend="eager")
def scaled(x, by):
    return x * by
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
for step in range(400):
    optimizer.zero_grad()
    name = "a" * min(step, 5)
    scaled(model(torch.randn(4, 8)), len(name)).mean().backward()
    optimizer.step()
"""


def launched(folder, text):
    (folder / "train.py").write_text(text)
    return workload_of(
        folder, "-m torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"
    )


def codes_of(workload):
    trial = run_trial(workload, Recipe(), machine(), TrialOptions(limit_s=120.0))
    assert trial.outcome is Outcome.OK, trial.message + trial.traceback
    assert trial.details["errors"] == []
    return {finding.code for finding in rules.add_findings(trial.profile, machine()).findings}


def test_ranks_with_the_same_samples_are_not_tuned(tmp_path):
    workload = launched(tmp_path, RANKS.format(sampling="shuffle=True", more="", epoch="pass"))
    options = TuneOptions(out=tmp_path / "out", wait=lambda _most_s: None, budget_s=60.0)

    with pytest.raises(UserError, match="same_data: all 2 ranks began with the same samples"):
        tune(workload, options, lambda _progress: None, machine())


def test_a_forgotten_set_epoch_and_a_needless_search_are_seen(tmp_path):
    more = ", find_unused_parameters=True"

    found = codes_of(launched(tmp_path, RANKS.format(sampling=SPLIT, more=more, epoch="pass")))

    assert {"same_order", "unused_search"} <= found
    assert "same_data" not in found


def test_ranks_that_do_it_right_are_left_alone(tmp_path):
    text = RANKS.format(sampling=SPLIT, more="", epoch="loader.sampler.set_epoch(epoch)")

    found = codes_of(launched(tmp_path, text))

    assert not found & {"same_data", "same_order", "unused_search", "ranks_on_one_gpu"}


def test_a_function_that_is_compiled_for_each_value_is_found(tmp_path):
    (tmp_path / "train.py").write_text(COMPILED)
    workload = Workload(target="train.py", folder=tmp_path, python=sys.executable)

    trial = run_trial(workload, Recipe(), machine(), TrialOptions(limit_s=120.0))

    assert trial.profile.compiling.place == "train.py:3"
    assert trial.profile.compiling.most >= 1
    assert trial.profile.compiling.seconds > 0
