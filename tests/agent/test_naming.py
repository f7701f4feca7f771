"""Functions in the place of torch's and Pillow's are pickled as those are."""

import functools
import io
import pickle
import sys

import pytest
import torch
from PIL import Image
from torch import nn

from flatout.agent import patching
from flatout.agent.guard.pinning import drop_dropout
from flatout.agent.undo_journal import announce_torch_save
from flatout.data import dataset_matching
from flatout.hardware.machine import read_machine
from flatout.records.recipe import Choice, Recipe
from flatout.records.trial import Outcome, Workload
from flatout.techniques.memory import chunked_cross_entropy
from flatout.tuning.trials import TrialOptions, run_trial
from tests.paths import ROOT

SCRIPT = ROOT / "tests/scripts/plain/keeps_functions.py"
functions = nn.functional


def redirected():
    # Another test of this process may have installed it: once more, whatever was there.
    dataset_matching._install.cache_clear()
    dataset_matching._install()
    patch = [p for p in patching.patches() if (p.owner, p.name) == (Image, "open")][-1]

    def undo():
        patch.undo()
        dataset_matching._install.cache_clear()

    return undo


def announced():
    plain = torch.save
    announce_torch_save()
    return functools.partial(setattr, torch, "save", plain)


class Keeps(nn.Module):
    """Holds a function of torch's, as layers with a choice of them do."""

    def __init__(self, function):
        super().__init__()
        self.function = function


@pytest.mark.parametrize(
    ("install", "place", "name"),
    [
        (lambda: chunked_cross_entropy.install(1), functions, "cross_entropy"),
        *((drop_dropout, functions, name) for name in ("dropout", "alpha_dropout", "rrelu")),
        (drop_dropout, functions, "scaled_dot_product_attention"),
        *((drop_dropout, torch, name) for name in ("dropout", "rrelu", "rrelu_")),
        (announced, torch, "save"),
        (redirected, Image, "open"),
    ],
)
def test_what_keeps_a_function_is_saved_and_loaded_with_it(install, place, name):
    own = getattr(place, name)
    file = io.BytesIO()
    undo = install()
    try:
        replaced = getattr(place, name)
        torch.save(Keeps(replaced), file)
        again = pickle.loads(pickle.dumps(functools.partial(replaced)))
    finally:
        undo()

    assert replaced is not own
    assert again.func is replaced
    file.seek(0)
    loaded = torch.load(file, weights_only=False).function
    assert loaded is own or loaded.__module__ == "flatout.agent.guard.pinning"


@pytest.mark.slow
def test_every_function_that_a_trial_puts_in_a_place_of_torchs_is_found_there(tmp_path):
    workload = Workload(target=str(SCRIPT), folder=tmp_path, python=sys.executable)
    recipe = Recipe(choices=(Choice(technique="chunked_cross_entropy", settings={"min_mib": 0}),))

    trial = run_trial(workload, recipe, read_machine(torch=False), TrialOptions(steps=3))

    # The script itself looks, and fails where one is not.
    assert trial.outcome is Outcome.OK, trial.message + trial.traceback
