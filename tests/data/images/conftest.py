import pytest

from flatout.data.images import substitution


@pytest.fixture(autouse=True)
def nothing_swapped():
    """No test finds a swap that another one left on."""

    def undo_all():
        for swap in list(substitution._SWAPS.values()):
            swap.undo()

    undo_all()
    yield
    undo_all()
