from dataclasses import replace

from flatout.records.readings import SyncPoint
from flatout.reporting.profile.memory import ON_CPU, syncs_lines

ITEM = SyncPoint(line="train.py:31", what="item", per_step=2.0, ms_per_step=3.25)
PRINT = SyncPoint(line="train.py:40", what="print", per_step=0.1)


def test_the_lines_are_shown_with_how_often_and_how_long(busy):
    lines = syncs_lines(replace(busy, syncs=(ITEM, PRINT), device_kind="cuda"), 80)

    assert lines == [
        "",
        "the host waits at  for    per step     cost",
        "-------------------------------------------",
        "train.py:31        item          2  3.25 ms",
        "train.py:40        print       0.1        -",
    ]


def test_on_the_cpu_it_says_that_nothing_waits(busy):
    lines = syncs_lines(replace(busy, syncs=(PRINT,), device_kind="cpu"), 200)

    assert lines[-1].endswith(ON_CPU)


def test_more_lines_than_a_reader_wants_are_left_to_the_json(busy):
    lines = syncs_lines(replace(busy, syncs=(ITEM,) * 9, device_kind="cuda"), 80)

    assert lines[-1] == "more         3 more lines are in the JSON"


def test_there_is_no_section_without_waits(busy):
    assert syncs_lines(busy, 80) == []
