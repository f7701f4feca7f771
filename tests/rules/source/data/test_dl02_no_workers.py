import pytest

from tests.rules.source.scenario import codes_in, fixed
from tests.rules.source.training import FILES

SAME_LOSSES = ("loader = DataLoader(TensorDataset(", f"{FILES}loader = DataLoader(Files(")
IS_ON_GPU = True
DATASET = """
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, TensorDataset
class Photos(Dataset):
    def __getitem__(self, i):
        {work}
data = {data}
loader = DataLoader(data, batch_size=8{more})
"""


def script(work="return Image.open(self.paths[i])", data="Photos()", more=""):
    return DATASET.format(work=work, data=data, more=more)


@pytest.mark.parametrize("more", ["", ", num_workers=0", ", shuffle=True"])
def test_a_loader_of_files_without_workers_is_found(more):
    assert codes_in(script(more=more)) == {"DL02": [9]}


@pytest.mark.parametrize(
    "changes",
    [
        {"more": ", num_workers=2"},
        {"more": ", num_workers=args.workers"},
        {"more": ", **options"},
        {"work": "return self.images[i]"},
        {"data": "TensorDataset(torch.zeros(3))"},
        {"data": "load(args)"},
    ],
)
def test_it_is_silent_where_workers_may_be_there_or_no_work_is_seen(changes):
    assert "DL02" not in codes_in(script(**changes))


def test_a_training_on_the_cpu_needs_its_cores_itself():
    step = "for x in loader:\n    opt.zero_grad()\n    model(x{copy}).backward()\n    opt.step()\n"

    assert "DL02" not in codes_in(script() + step.format(copy=""))
    assert "DL02" in codes_in(script() + step.format(copy=".cuda()"))


def test_the_fix_gives_workers_and_keeps_the_rest():
    assert "DataLoader(data, batch_size=8, num_workers=4)" in fixed(script(), "DL02")
    assert "batch_size=8, num_workers=4)" in fixed(script(more=", num_workers=0"), "DL02")


def test_a_number_given_by_position_is_replaced_there():
    text = script(more=", True, None, None, 0").replace("batch_size=8", "8")

    assert "DataLoader(data, 8, True, None, None, 4)" in fixed(text, "DL02")
