import pytest

from tests.rules.source.scenario import codes_in

CODE = """
import torch
from torch.utils.data import Dataset, DataLoader
class Points(Dataset):
    def __getitem__(self, i):
        return {sample}
def collate(rows):
    return {batch}
loader = DataLoader(Points(), collate_fn=collate)
"""


def found(sample="rows[i]", batch="torch.stack(rows)"):
    return codes_in(CODE.format(sample=sample, batch=batch)).get("DL12", [])


@pytest.mark.parametrize(
    "sample", ["x.cuda()", "x.to('cuda')", "x.to(self.device)", "torch.tensor(3, device='cuda')"]
)
def test_a_sample_on_the_gpu_is_found(sample):
    assert found(sample=sample) == [6]


def test_a_batch_that_is_collated_on_the_gpu_is_found():
    assert found(batch="torch.stack(rows).to(device)") == [8]


@pytest.mark.parametrize(
    "sample", ["x.to(torch.float32)", "x.to('cpu')", "torch.tensor(3, device='cpu')", "x.cpu()"]
)
def test_samples_on_the_cpu_are_left_alone(sample):
    assert found(sample=sample) == []
