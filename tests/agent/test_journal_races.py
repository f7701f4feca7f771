"""Races: another program at work in the folder at seeded random moments, or a second trial.

The program is forked and runs next to the script. It destroys nothing: before it puts a file in
place it renames what is there, so whatever the user had must be somewhere afterwards.
"""

import os
import random
import shutil
import signal
import time
import traceback
from pathlib import Path

import pytest

from flatout.agent import undo_journal
from flatout.agent.journal_file import open_claims
from flatout.agent.undo_journal import UNRECORDED_EXIT_CODE
from flatout.launch.rollback import rollback
from tests.agent.test_undo_journal import filled, listing

NAMES = ("model.pt", "old/b.txt", "old/c.txt", "made", "runs/w.pt")
MAX_PAUSE_S = 0.002
NUM_STEPS = 12


def forked(work, act, *arguments):
    """Do something in a child of its own in the folder, and give its number."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.chdir(work)
        act(*arguments)
        code = 0
    except BaseException:  # noqa: BLE001  shown by pytest
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def steps(dice):
    """Give a pause and a name, so many times."""
    for number in range(NUM_STEPS):
        time.sleep(dice.random() * MAX_PAUSE_S)
        yield number, dice.choice(NAMES)


def script(seed, folder):
    """A script with a journal that writes, replaces, renames and removes."""
    undo_journal.install(folder, ())
    dice = random.Random(seed)
    for _, name in steps(dice):
        path = Path(name)
        try:
            match dice.randrange(6):
                case 0:
                    path.write_text("of the trial")
                case 1:
                    with path.open("a") as file:
                        file.write("of the trial")
                case 2:
                    path.unlink()
                case 3:
                    Path("part").write_text("of the trial")
                    Path("part").replace(path)
                case 4:
                    path.rename("moved")
                case _:
                    path.parent.mkdir(exist_ok=True)
                    if path.parent != Path():
                        shutil.rmtree(path.parent)
        except OSError:
            pass  # what is not there now


def other(seed):
    """Another program: it puts new files in place of others, and renames."""
    dice = random.Random(seed)
    for number, name in steps(dice):
        path = Path(name)
        try:
            path.rename(f"{name}.saved-{number}")
            draft = Path(f"{name}.draft-{number}")
            draft.write_text(f"another program's {number}")
            draft.rename(path)
            Path(f"another-{number}").write_text(f"alone {number}")
        except OSError:
            pass  # what is not there now


def texts(work):
    return [path.read_text() for path in work.rglob("*") if path.is_file()]


def race_with_a_program(place, seed):
    """Run a trial next to another program, roll it back, and return what is missing."""
    place.mkdir()
    work, folder = filled(place), place / "trial"
    folder.mkdir()
    had = {text for text in texts(work) if text.startswith("the user's")}
    children = [forked(work, script, seed, folder), forked(work, other, seed + 1)]
    codes = [ended(child) for child in children]
    alone = {path.name: path.read_text() for path in work.glob("another-*")}
    undone = rollback(folder)
    left = texts(work)
    missing = [text for text in had if not any(text in one for one in left)]
    missing += [name for name, text in alone.items() if (work / name).read_text() != text]
    missing += undone.failed
    return [*missing, codes] if missing or codes not in ([0, 0], [UNRECORDED_EXIT_CODE, 0]) else []


def race_of_two_trials(place, seed, order):
    """Run two trials in one folder, roll both back in an order, return what differs unnamed.

    Both run at the same time, or the second begins when a random kill ended the first, as the
    folder's lock allows. Their supervisors, here this process, live until both are rolled back.
    """
    place.mkdir()
    dice = random.Random(seed)
    work = filled(place)
    before = listing(work)
    folders = [place / name for name in ("trial-a", "trial-b")]
    for folder in folders:
        folder.mkdir()
    held = [open_claims(folder) for folder in folders]
    first = forked(work, script, 2 * seed, folders[0])
    time.sleep(dice.random() * NUM_STEPS * MAX_PAUSE_S)
    if dice.random() < 0.5:
        os.kill(first, signal.SIGKILL)
    second = forked(work, script, 2 * seed + 1, folders[1])
    codes = {ended(first), ended(second)}
    undone = [rollback(folders[index]) for index in order]
    for number in held:
        os.close(number)
    named = "\n".join(line for one in undone for line in one.differences)
    after = listing(work)
    changed = [name for name in {*before, *after} if before.get(name) != after.get(name)]
    missing = [name for name in changed if str(work / name) not in named]
    if not codes <= {0, -signal.SIGKILL, UNRECORDED_EXIT_CODE}:
        missing.append(f"exit codes {codes}")
    return missing


@pytest.mark.parametrize("seed", range(5))
def test_a_program_at_work_at_random_moments_costs_nothing_of_the_user_s(tmp_path, seed):
    assert race_with_a_program(tmp_path / "w", seed) == []


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("seed", range(3))
def test_after_two_trials_every_file_is_as_before_or_named_in_either_order(tmp_path, seed, order):
    assert race_of_two_trials(tmp_path / "w", seed, order) == []


@pytest.mark.slow
@pytest.mark.chaos
def test_two_hundred_races_with_a_program_cost_nothing(tmp_path):
    for seed in range(100, 300):
        assert race_with_a_program(tmp_path / str(seed), seed) == [], seed


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_hundred_pairs_of_trials_leave_every_file_as_before_or_named(tmp_path, order):
    for seed in range(100, 300):
        assert race_of_two_trials(tmp_path / str(seed), seed, order) == [], seed
