import pytest

from tests.rules.source.scenario import codes_in

CODE = """
from torch.nn.parallel import DistributedDataParallel
model = {wrap}(model)
for i, x in enumerate(loader):
    loss = model(x) / accum
    {backward}
    if i % accum == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


def test_an_exchange_for_each_batch_is_found():
    text = CODE.format(wrap="DistributedDataParallel", backward="loss.backward()")

    assert codes_in(text) == {"DS08": [6]}


@pytest.mark.parametrize(
    ("wrap", "backward"),
    [
        ("make", "loss.backward()"),
        ("DistributedDataParallel", "with model.no_sync(): loss.backward()"),
    ],
)
def test_one_process_and_no_sync_are_left_alone(wrap, backward):
    assert codes_in(CODE.format(wrap=wrap, backward=backward)) == {}
