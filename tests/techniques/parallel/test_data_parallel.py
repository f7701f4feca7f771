"""A script for one device trains in several ranks as in one process: losses, weights, files."""

import os
import re
import subprocess
import sys

import pytest
import torch

from flatout.records.errors import NotApplicable, UserError
from flatout.records.parallel import ParallelSpec
from flatout.records.recipe import Recipe
from flatout.records.trial import Workload
from flatout.techniques.parallel.data_parallel import DataParallel
from flatout.workflow.run import Sharding, spread_over
from tests.paths import ROOT

PROMISE = "this module compares with one process"
SCRIPTS = ROOT / "tests/scripts/ranks"
CLOSE = 1e-12
"""Relative: the scripts compute in float64, and the order of sums is all that differs."""


def trained(folder, script, *arguments, options=()):
    """Run a script in a folder, plainly or in ranks, and return how that ended."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    if options:
        flatout = [sys.executable, "-m", "flatout", "run", *options]
        command = [*flatout, str(SCRIPTS / script), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def tensors(plain, path=""):
    """Yield the tensors of a checkpoint by name, but for random states."""
    if isinstance(plain, dict):
        for key, value in plain.items():
            yield from tensors(value, f"{path}.{key}")
    elif isinstance(plain, torch.Tensor) and not path.endswith(".rng"):
        yield path, plain


def same_weights(one, other, close=CLOSE):
    ours, theirs = (dict(tensors(torch.load(f / "ck.pt", weights_only=True))) for f in (one, other))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert type(theirs[name]) is torch.Tensor
        torch.testing.assert_close(theirs[name], value, rtol=close, atol=close)


def numbers(text):
    return [float(found) for found in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", text)]


def test_what_it_is_given_is_checked():
    shards = ({"ranks": 4, "zero": 3, "shard": 3}, {"shard": 2})
    for wrong in ({"ranks": 0}, {"zero": 1}, *shards, {"zero": 2, "offload": True}):
        with pytest.raises(ValueError, match="="):
            DataParallel(**wrong)


def test_a_process_that_is_no_rank_is_left_alone():
    technique = DataParallel()

    technique.start()

    with pytest.raises(NotApplicable, match="no rank"):
        technique.loader({})
    assert technique.settings() == {"ranks": 2, "zero": 0, "shard": 0, "offload": False}


def test_one_process_that_offloads_is_a_rank_without_a_launcher():
    workload = Workload(target="train.py", python="python")

    spread, recipe = spread_over(workload, Recipe(), 1, sharding=Sharding(zero=3, offload=True))
    alone, plain = spread_over(workload, Recipe(), 1, sharding=Sharding(zero=3))

    (choice,) = recipe.choices
    assert (spread.ranks, choice.settings) == (1, {"ranks": 1, "zero": 3, "offload": True})
    assert DataParallel(**choice.settings).environment({"A": "b"}).items() >= {
        ("A", "b"),
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
    }
    assert DataParallel(ranks=2, zero=3, offload=True).environment({}) == {}
    assert (alone, plain.choices) == (workload, ())


@pytest.mark.parametrize(
    ("target", "spec", "given", "why"),
    [
        ("train.py", None, {"zero": 2, "offload": True}, "--zero 3 shards: give both"),
        ("train.py", ParallelSpec(), {"offload": True}, "a zero of its own"),
        ("task.py:fit", None, {"zero": 3, "offload": True}, "offload is for scripts"),
        ("task.py:fit", ParallelSpec(zero=3, offload=True), {}, "offload is for scripts"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(target, spec, given, why):
    workload = Workload(target=target, python="python", is_task=":" in target)

    with pytest.raises(UserError, match=why):
        spread_over(workload, Recipe(parallel=spec), 1, sharding=Sharding(**given))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options"),
    [
        pytest.param("plain.py", ("--ranks", "2"), marks=pytest.mark.smoke),
        ("plain.py", ("--ranks", "4")),
        ("plain.py", ("--ranks", "2", "--zero", "2")),
        ("plain.py", ("--ranks", "2", "--zero", "3", "--offload")),
        ("plain.py", ("--ranks", "1", "--zero", "3", "--offload")),
        ("habits.py", ("--ranks", "2")),
        ("habits.py", ("--ranks", "2", "--zero", "2")),
        ("habits.py", ("--ranks", "1", "--zero", "3", "--offload")),
        ("gan.py", ("--ranks", "2")),
        ("get_batch.py", ("--ranks", "2")),
        pytest.param("chained.py", ("--ranks", "2"), marks=pytest.mark.smoke),
        ("chained.py", ("--ranks", "4")),
        ("sums.py", ("--ranks", "2")),
        ("sums.py", ("--ranks", "4", "--zero", "2")),
        ("stream.py", ("--ranks", "2")),
        ("phases.py", ("--ranks", "2")),
        ("weighed.py", ("--ranks", "2")),
        ("labels.py", ("--ranks", "2")),
        ("groups.py", ("--ranks", "2")),
        ("sparse.py", ("--ranks", "2")),
    ],
)
def test_losses_and_weights_are_those_of_one_process(tmp_path, script, options):
    alone = trained(tmp_path / "alone", script)
    spread = trained(tmp_path / "spread", script, options=options)

    assert spread.returncode == 0, spread.stderr
    assert numbers(spread.stdout) == pytest.approx(numbers(alone.stdout), rel=CLOSE)
    same_weights(tmp_path / "alone", tmp_path / "spread")
    assert [path.name for path in (tmp_path / "spread").iterdir()] == ["ck.pt"]
    assert "flatout:" not in spread.stderr


@pytest.mark.slow
def test_the_trainer_of_transformers_trains_as_in_one_process(tmp_path):
    alone = trained(tmp_path / "alone", "trainer.py")
    spread = trained(tmp_path / "spread", "trainer.py", options=("--ranks", "2"))

    assert spread.returncode == 0, spread.stderr
    # In float32, and printed with four digits.
    losses = [re.findall(r"loss': '([\d.]+)", run.stdout) for run in (alone, spread)]
    assert len(losses[0]) == 19  # 16 steps, two evaluations, the mean
    assert list(map(float, losses[1])) == pytest.approx(list(map(float, losses[0])), abs=2e-3)
    same_weights(tmp_path / "alone", tmp_path / "spread", close=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [("0",), ("3",), ("3", "--offload")])
def test_a_checkpoint_of_ranks_goes_on_in_one_process_and_back(tmp_path, zero):
    spread = ("--ranks", "2", "--zero", *zero)
    whole = trained(tmp_path / "whole", "resumes.py", "3")
    for number, options in enumerate([spread, (), spread]):
        part = trained(tmp_path / "parts", "resumes.py", "1", options=options)
        assert part.returncode == 0, (number, part.stderr)

    assert numbers(part.stdout) == pytest.approx(numbers(whole.stdout)[-2 * 8 :], rel=CLOSE)
    same_weights(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_each_sample_is_drawn_once_in_an_epoch_with_draws_that_differ_by_rank(tmp_path, workers):
    (tmp_path / "seen").mkdir()
    seen = []
    for _ in range(2):
        run = trained(
            tmp_path / "work", "draws.py", workers, str(tmp_path / "seen"), options=("--ranks", "2")
        )
        assert run.returncode == 0, run.stderr
        parts = [torch.load(tmp_path / "seen" / f"{rank}.pt") for rank in range(2)]
        seen.append(parts)

    per_epoch = len(seen[0][0]) // 2
    for start in (0, per_epoch):
        epoch = [part[start : start + per_epoch] for part in seen[0]]
        indices = [int(row[0]) for part in epoch for batch in part for row in batch]
        assert sorted(indices) == list(range(32))
    drawn = [{row[1] for batch in part for row in batch} for part in seen[0]]
    assert not drawn[0] & drawn[1]
    assert seen[0] == seen[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("own group", "starts its own process group"),
        ("changed apart", "after step 1 the parameters differ from rank 0's"),
        ("batches apart", "rank 1: this rank makes other batches than rank 0"),
        ("counts on 8", "of which each rank has a part, 4 of 8 samples"),
        ("one fails", "a disk of this rank is full"),
        ("one sample", "this rank had one sample of a batch: what needs several"),
        ("reentrant", "give it use_reentrant=False"),
    ],
)
def test_what_cannot_be_spread_ends_with_the_reason_and_leaves_no_process(tmp_path, kind, why):
    run = trained(tmp_path / "work", "wrong.py", kind, options=("--ranks", "2"))

    assert run.returncode != 0
    assert why in run.stderr
    assert "gloo" not in run.stderr  # what another rank lost by it
    assert re.search(r"rank \d of 2 ended with exit code", run.stderr)
    assert "trained to the end" not in run.stdout
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True)
    assert left.stdout == ""


@pytest.mark.slow
def test_what_has_its_samples_elsewhere_trains_on_whole_batches_and_says_so(tmp_path):
    alone = trained(tmp_path / "alone", "time_first.py")
    spread = trained(tmp_path / "spread", "time_first.py", options=("--ranks", "2"))

    assert spread.returncode == 0, spread.stderr
    assert numbers(spread.stdout) == pytest.approx(numbers(alone.stdout), rel=CLOSE)
    same_weights(tmp_path / "alone", tmp_path / "spread")
    assert spread.stderr.count("flatout:") == 1
    assert "what LSTM makes of a batch is not what it makes of its parts" in spread.stderr


@pytest.mark.slow
def test_a_sampler_that_draws_apart_on_each_rank_is_named_once(tmp_path):
    run = trained(tmp_path / "work", "wrong.py", "samplers apart", options=("--ranks", "2"))

    assert run.returncode == 0
    assert run.stderr.count("the ranks choose different samples") == 1


@pytest.mark.slow
def test_a_rank_that_goes_on_alone_says_what_may_have_stopped_the_other(tmp_path):
    run = trained(tmp_path / "work", "wrong.py", "one stops", options=("--ranks", "2"))

    assert run.returncode != 0
    assert "another rank has ended. If none has failed, the script stopped early" in run.stderr


@pytest.mark.slow
def test_what_differs_from_one_process_is_said_once(tmp_path):
    run = trained(tmp_path / "work", "wrong.py", "root and hook", options=("--ranks", "2"))

    assert run.returncode == 0, run.stderr
    assert run.stderr.count("the loss is no mean over the samples, but made of one") == 1
    assert run.stderr.count("the loss adds means that are over different numbers of labels") == 1
    assert run.stderr.count("the loss compares the samples of a batch with each other") == 1
    assert run.stderr.count("a hook on a parameter sees the gradient of each rank's part") == 1


@pytest.mark.slow
def test_views_put_together_are_a_part_of_the_batch_too(tmp_path):
    run = trained(tmp_path / "work", "wrong.py", "views", options=("--ranks", "2"))

    assert run.returncode == 0, run.stderr
    assert run.stderr.count("the loss compares the samples of a batch with each other") == 1


@pytest.mark.slow
def test_parameters_kept_where_they_cannot_be_replaced_end_it(tmp_path):
    run = trained(tmp_path / "work", "wrong.py", "tuple", options=("--ranks", "2", "--zero", "2"))

    assert "the script keeps its parameters in a tuple: use a list" in run.stderr
    assert "trained to the end" not in run.stdout


@pytest.mark.slow
@pytest.mark.parametrize("technique", ["torch_compile", "regional_compile"])
@pytest.mark.parametrize("zero", ["0", "2", "3"])
def test_what_is_compiled_trains_in_ranks_as_it_is_in_one_process(tmp_path, technique, zero):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'[flatout]\nversion = "0.1.0"\n[[technique]]\nname = "{technique}"\n')
    spread = ("--with", str(recipe), "--ranks", "2", "--zero", zero)

    alone = trained(tmp_path / "alone", "resumes.py", "1")
    compiled = trained(tmp_path / "spread", "resumes.py", "1", options=spread)

    assert compiled.returncode == 0, compiled.stderr
    assert numbers(compiled.stdout) == pytest.approx(numbers(alone.stdout), rel=CLOSE)
    same_weights(tmp_path / "alone", tmp_path / "spread")


@pytest.mark.slow
def test_more_gpus_than_there_are_is_refused_in_one_line(tmp_path):
    run = trained(tmp_path / "work", "plain.py", options=("--gpus", "64"))

    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert "--gpus 64: this machine has" in run.stderr
