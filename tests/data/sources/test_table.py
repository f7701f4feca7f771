import csv

import pytest

import flatout.data
from flatout.records.errors import UserError
from tests.data.packs import file_bytes, packed


def table(folder, text, name="a.csv"):
    (folder / name).write_text(text)
    return folder / name


def opened(folder):
    return flatout.data.open(folder, order="source", decode="bytes")


def test_columns_get_their_types_and_files_come_in(tmp_path):
    for number in range(2):
        (tmp_path / f"{number}.jpg").write_bytes(file_bytes(number))
    path = table(tmp_path, "path,label,weight,note\n0.jpg,dog,0.5,x\n1.jpg,cat,2,7\n")

    packed(path, tmp_path / "a")

    data = opened(tmp_path / "a")
    assert data.classes == ("cat", "dog")
    assert data[0] == {"path": file_bytes(0), "label": 1, "weight": 0.5, "note": "x"}
    assert data[1] == {"path": file_bytes(1), "label": 0, "weight": 2.0, "note": "7"}


def test_tables_without_files_and_with_tabs_are_packed_too(tmp_path):
    packed(table(tmp_path, "x\ty\n1\t2.5\n3\t4\n", "a.tsv"), tmp_path / "a")

    assert list(opened(tmp_path / "a")) == [{"x": 1, "y": 2.5}, {"x": 3, "y": 4.0}]


def test_two_rows_may_show_the_same_file(tmp_path):
    (tmp_path / "0.jpg").write_bytes(file_bytes(0))

    assert packed(table(tmp_path, "path,y\n0.jpg,1\n0.jpg,2\n"), tmp_path / "a").samples == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no samples"),
        ("a,b\n", "holds no samples"),
        ("a,b\n1\n", "line 2: 1 cells, and the header has 2"),
        ("a,a\n1,2\n", "two columns have the same name"),
        ("path\nmissing.jpg\n", r"missing\.jpg: the file is gone"),
        ("path\na\0.jpg\n", "no file has such a name|line contains NUL"),  # up to Python 3.10
    ],
)
def test_mistakes_are_named(tmp_path, text, words):
    with pytest.raises(UserError, match=words):
        packed(table(tmp_path, text), tmp_path / "a")


@pytest.mark.parametrize(
    "cells",
    [
        ["00123", "00007"],
        ["1_0", "20"],
        ["007", "0.5"],
        ["1_0.5", "2.5"],
        ["+1", "2"],
        [" 1", "2"],
        ["12345678901234567890", "1"],
        ["9" * 5000, "1"],
        ["1", ""],
    ],
)
def test_texts_that_look_like_numbers_stay_what_is_written(tmp_path, cells):
    packed(table(tmp_path, f"zip,y\n{cells[0]},1\n{cells[1]},2\n"), tmp_path / "a")

    assert [row["zip"] for row in opened(tmp_path / "a")] == cells


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (["0", "-12", "9223372036854775807"], [0, -12, 2**63 - 1]),
        (["0.50", "-1", ".5"], [0.5, -1.0, 0.5]),
        (["1e-3", "2.E5", "-inf"], [0.001, 200_000.0, float("-inf")]),
    ],
)
def test_columns_of_numbers_are_numbers(tmp_path, cells, values):
    packed(table(tmp_path, "\n".join(["x", *cells]) + "\n"), tmp_path / "a")

    found = [row["x"] for row in opened(tmp_path / "a")]
    assert found == values
    assert {type(value) for value in found} == {type(values[0])}


def test_labels_with_leading_zeros_are_classes(tmp_path):
    packed(table(tmp_path, "x,label\n1,007\n2,01\n"), tmp_path / "a")

    data = opened(tmp_path / "a")
    assert data.classes == ("007", "01")
    assert data.targets == [0, 1]


def test_long_texts_are_packed(tmp_path):
    (tmp_path / "a.csv").write_text(f"text,label\n{'x' * 200_000},1\n")
    limit = csv.field_size_limit()

    packed(tmp_path / "a.csv", tmp_path / "a")

    assert len(flatout.data.open(tmp_path / "a")[0]["text"]) == 200_000
    assert csv.field_size_limit() == limit
