from dataclasses import replace

from flatout.records.journey import TRAINING, Journey
from flatout.records.readings import Limits
from flatout.reporting.profile.journey import journey_lines
from tests.rules.journey_facts import MIB, journey, leg, worker


def text_of(profile):
    return "\n".join(journey_lines(profile, 1000))


def test_is_silent_where_no_journey_was_followed(starved):
    assert journey_lines(starved, 80) == []


def test_workers_show_what_a_sample_costs_and_what_was_read(starved):
    text = text_of(replace(starved, journey=journey()))

    assert "in the loop: waiting at the loader's queue 50.0 ms (50 %)" in text
    assert "2, busy 90 % to 90 %; 9.00 ms a sample: blocked in reading 67 %, " in text
    assert "system time 10 %, 10.0 times a second another process took a worker's core" in text
    assert "6.0 MiB a step from files, none of it from storage: cached" in text
    assert "growth" not in text


def test_growth_and_what_is_not_known_are_told(starved):
    followed = replace(journey(growth=2.0 * MIB), missing={"bytes read": "not here"})

    text = text_of(replace(starved, journey=followed))

    assert "a worker's memory grows by 2.0 MiB a step" in text
    assert "bytes read: not here" in text


def test_copies_are_held_against_what_the_machine_can_do(starved):
    copies = leg("h2d", 10.0, where=TRAINING, bytes_per_step=20.0 * MIB, bytes_per_s=2000.0 * MIB)

    text = text_of(
        replace(
            starved,
            journey=Journey(legs=(copies,)),
            limits=Limits(copy_bytes_per_s=8000.0 * MIB),
        )
    )

    assert "20.0 MiB a step to the device at 1.95 GiB/s of 7.81 GiB/s measured" in text


def test_lines_keep_within_the_width(starved):
    assert all(len(line) <= 80 for line in journey_lines(replace(starved, journey=journey()), 80))


def started(starved, **facts):
    first, *others = starved.loaders
    loaders = (replace(first, is_training=True, **facts), *others)
    return text_of(replace(starved, journey=journey(), loaders=loaders))


def test_how_workers_start_is_told_and_explained(starved):
    assert "started      by fork: a copy of the training process" in started(
        starved, start_method="fork"
    )
    assert "by spawn: a fresh process that imports the script" in started(
        starved, start_method="spawn"
    )
    assert "started" not in started(starved)


def test_who_chose_the_start_method_is_told(starved):
    text = started(starved, start_method="fork", start_reason="flatout forks them: no main guard")

    assert "data set holds (flatout forks them: no main guard)" in " ".join(text.split())


def test_what_fork_risks_is_told_where_it_was_seen(starved):
    text = started(
        starved, start_method="fork", cuda_at_start=True, threads_at_start="tqdm_monitor"
    )

    assert "CUDA was initialised before" in text
    assert 'multiprocessing_context="spawn"' in text
    assert "threads of Python's were alive (tqdm_monitor)" in text
    assert 'multiprocessing_context="forkserver"' in text


def test_a_fresh_process_takes_over_no_cuda_and_no_locks(starved):
    text = started(
        starved, start_method="forkserver", cuda_at_start=True, threads_at_start="tqdm_monitor"
    )

    assert "CUDA" not in text
    assert "tqdm_monitor" not in text


def test_storage_that_gave_more_than_was_read_is_not_called_a_part_of_it(starved):
    facts = (worker(0, read_bytes_per_step=22.0, storage_bytes_per_step=315.9 * 1024),)

    text = text_of(replace(starved, journey=replace(journey(), workers=facts)))

    assert "315.9 KiB a step from storage, 22 bytes of it by reading files" in text
