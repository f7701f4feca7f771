import pytest

from tests.rules.source.scenario import codes_in, fixed

SAME_LOSSES = ("", "")
IS_ON_GPU = True
LOOP = """
import torch
from tqdm import tqdm
from torch.utils.data import DataLoader
device = torch.device("{device}")
loader = DataLoader(data, 8{more})
for i, batch in enumerate(tqdm(loader)):
    x, y = batch
    x = {copy}
"""


def script(device="cuda", more="", copy="x.to(device)"):
    return LOOP.format(device=device, more=more, copy=copy)


@pytest.mark.parametrize(
    "copy",
    [
        "x.to(device)",
        "x.cuda()",
        "batch[0].to('cuda:0')",
        "{name: value.to(device) for name, value in batch.items()}",
        "[part.to(device) for part in batch]",
    ],
)
def test_a_copy_from_pageable_memory_is_found_at_the_loader(copy):
    assert codes_in(script(copy=copy)) == {"DL16": [6]}


@pytest.mark.parametrize(
    "changes",
    [
        {"more": ", pin_memory=True"},
        {"more": ", pin_memory=args.pin"},
        {"device": "cpu"},
        {"copy": "x.to(torch.float16)"},
        {"copy": "other.cuda()"},
        {"copy": "x.float()"},
    ],
)
def test_it_is_silent_where_nothing_pageable_goes_to_a_gpu(changes):
    assert "DL16" not in codes_in(script(**changes))


def test_the_fix_changes_the_loader_and_the_copy():
    text = fixed(script(), "DL16")

    assert "DataLoader(data, 8, pin_memory=True)" in text
    assert "x.to(device, non_blocking=True)" in text


def test_batches_that_the_collate_function_puts_on_the_device_cannot_be_pinned():
    assert codes_in(script(more=", collate_fn=batcher(device)")) == {}
    assert codes_in(script(more=", collate_fn=batcher(tokenizer)")) == {"DL16": [6]}
