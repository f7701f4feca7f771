import sys
from types import SimpleNamespace

import numpy as np
import pytest

from flatout.data.byte_batches import levels
from flatout.data.byte_batches.levels import Grid, LentGrid, Pixels, UnfollowableError


def borrowed(thing):
    """Count references as Python 3.14 does, where an argument borrows that of a local variable."""
    count = sys.getrefcount(thing) - 1  # before the look at local variables, which holds them
    return count - any(value is thing for value in sys._getframe(1).f_locals.values())


@pytest.mark.parametrize("count", [sys.getrefcount, borrowed])
def test_memory_that_an_array_lends_is_shared_as_long_as_it_lives(monkeypatch, count):
    monkeypatch.setattr(levels, "sys", SimpleNamespace(getrefcount=count))
    array = Pixels(np.zeros(4), Grid(None, None), None)
    tensor = Pixels(array.view, LentGrid(None, array.grid), None)

    with pytest.raises(UnfollowableError, match="is changed in place while a view of it"):
        levels.refuse_shared(tensor, "is changed in place")
    del array

    levels.refuse_shared(tensor, "is changed in place")


@pytest.mark.parametrize("count", [sys.getrefcount, borrowed])
def test_an_image_has_other_views_as_long_as_they_live(monkeypatch, count):
    monkeypatch.setattr(levels, "sys", SimpleNamespace(getrefcount=count))
    image = Pixels(np.zeros(4), Grid(None, None), None)
    view = image.laid_out(image.view[1:], None)

    assert image.has_other_views()
    del view

    assert not image.has_other_views()
