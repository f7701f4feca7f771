"""The table in the benchmarks' page is made of the records and of nothing else."""

import pytest

from benchmarks.record import RECORDS, write_record
from benchmarks.table import NONE_YET, PAGE, read_records, table, with_table
from tests.benchmarks.made_up import a_machine, a_record


def test_the_page_shows_the_records_that_lie_there():
    page = PAGE.read_text()

    assert page == with_table(page, table(read_records(RECORDS)))


def test_each_record_is_a_row_the_latest_first(tmp_path):
    for date, record in [
        ("2026-01-02", a_record()),
        ("2026-03-04", a_record(theme="memory", holds=False)),
    ]:
        write_record(record, a_machine(), date=date, log="", root=tmp_path)

    rows = table(read_records(tmp_path)).splitlines()[2:]

    assert [row.split(" | ")[0] for row in rows] == ["| 2026-03-04", "| 2026-01-02"]
    assert "[speed](records/2026-01-02_speed_2xamd-epyc/README.md)" in rows[1]
    assert rows[0].endswith("| **no** |")


def test_a_folder_of_another_kind_is_left_alone(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "result.json").write_text('{"schema": "something/2"}')

    assert table(read_records(tmp_path)) == NONE_YET


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match="no marks"):
        with_table("text", "table")
