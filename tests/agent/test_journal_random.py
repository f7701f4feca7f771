"""The undo journal under random faults, with another program at work at a random moment."""

import random
import sys

import pytest

from flatout.launch.rollback import rollback
from tests.agent.test_journal_attacked import BODY, reference, run_with_fault
from tests.agent.test_undo_journal import filled, listing


def attacked(place, seed):
    """Run a random script with a random fault and another program at a random moment."""
    drawn = random.Random(seed)
    place.mkdir()
    work = filled(place)
    steps = [line for line in BODY.strip().splitlines() if not line.startswith((" ", "with"))]
    drawn.shuffle(steps)
    moment = drawn.randrange(len(steps) + 1)
    path = drawn.choice(["model.pt", "old/b.txt", "newer", "runs/w.pt", "old/c.txt"])
    other = f"open({path!r} + '.o', 'w').write('newer'); os.replace({path!r} + '.o', {path!r}); "
    other += "open('../other-ran', 'w')"
    steps.insert(moment, f"os.system('{sys.executable} -S -c \"import os; ' + {other!r} + '\"')")
    body = "\n".join(f"try:\n    {step}\nexcept OSError:\n    pass" for step in steps)
    how = drawn.choice(["fail", "short", "kill"])
    only = ("write",) if how == "short" else ("write", "fsync", "rename")
    run_with_fault(place, drawn.randrange(1, 60), how, only, body)
    return work, path, rollback(place / "trial")


def lost_with(place, seed):
    """Return what the user had, or the other program wrote, that is neither there nor named."""
    work, path, undone = attacked(place, seed)
    after, named = listing(work), " ".join(undone.differences)
    lost = [
        name
        for name, what in reference(place).items()
        if after.get(name) != what and str(work / name) not in named and name != path
    ]
    texts = [file.read_text() for file in work.rglob("*") if file.is_file()]
    if (place / "other-ran").exists() and "newer" not in texts:
        lost.append("what the other program wrote")
    return lost


@pytest.mark.chaos
@pytest.mark.parametrize("seed", [*range(20), 1301])
def test_random_faults_lose_nothing(tmp_path, seed):
    assert lost_with(tmp_path / "w", seed) == []


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize("block", range(10))
def test_a_thousand_random_faults_lose_nothing(tmp_path, block):
    for seed in range(1000 + 100 * block, 1100 + 100 * block):
        assert lost_with(tmp_path / str(seed), seed) == [], seed
