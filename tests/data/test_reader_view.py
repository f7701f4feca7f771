"""Raw pixels where they lie in the store: nothing is copied, nothing can be spoilt."""

import numpy as np
import pytest

import flatout.data
from flatout.data.format import Encoding
from tests.data.packs import image_folder, packed


@pytest.fixture
def folder(tmp_path):
    source = image_folder(tmp_path / "photographs")
    packed(source, tmp_path / "packed", encoding=Encoding(kind="raw"))
    return tmp_path / "packed"


def test_a_view_holds_what_a_copy_holds(folder):
    views, copies = (flatout.data.open(folder, decode=kind) for kind in ("view", "numpy"))

    assert len(views) == 12
    for (view, label), (copied, same_label) in zip(views, copies, strict=True):
        assert np.array_equal(view, copied)
        assert label == same_label


def test_a_view_cannot_be_written(folder):
    view, _ = flatout.data.open(folder, decode="view")[0]

    with pytest.raises(ValueError, match="read-only"):
        view[0, 0, 0] = 1
