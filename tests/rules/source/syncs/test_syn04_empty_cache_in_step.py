import pytest

from tests.rules.source.scenario import codes_in, fixed
from tests.rules.source.training import READ

SAME_LOSSES = (READ, f"{READ}        torch.cuda.empty_cache()\n")
IS_ON_GPU = True
STEP = """
import torch, gc
for epoch in range(3):
    for step, x in enumerate(loader):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        {line}
    torch.cuda.empty_cache()
"""


@pytest.mark.parametrize("line", ["torch.cuda.empty_cache()", "gc.collect()"])
def test_giving_memory_back_in_every_step_is_found_and_taken_out(line):
    text = STEP.format(line=line)

    assert codes_in(text) == {"SYN04": [8]}
    assert fixed(text, "SYN04") == text.replace(f"        {line}\n", "")


def test_once_an_epoch_or_every_hundred_steps_is_left_alone():
    assert codes_in(STEP.format(line="if step % 100 == 0: gc.collect()")) == {}
