"""Run the kernels of sliced cross-entropy in Triton's interpreter and print how far each is off.

In a process of its own: whether Triton interprets is decided when it is imported.
"""

import json

import torch
from torch.nn import functional

from flatout.techniques.memory.chunked_cross_entropy import row_kernels

ROWS = 5
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def off(got, wanted):
    """Return the largest error in units of the largest entry."""
    return ((got.double() - wanted).abs().max() / wanted.abs().max()).item()


def errors(logits):
    """Return how far the loss of each row and its gradient are off those of float64."""
    targets = torch.arange(ROWS) * (logits.shape[1] // ROWS)
    weights = torch.linspace(-1, 1, ROWS)
    exact = logits.double().requires_grad_()
    losses = functional.cross_entropy(exact, targets, reduction="none")
    (wanted,) = torch.autograd.grad(losses, exact, weights.double())
    normalizers = row_kernels.find_normalizers(logits)
    made = row_kernels.make_gradient(logits, targets, normalizers, weights)
    most = ROWS * (logits.shape[1] + row_kernels.MOST_PADDING)
    assert made.untyped_storage().nbytes() <= most * made.element_size()
    chosen = logits.gather(1, targets[:, None])[:, 0]
    return [off(normalizers - chosen.float(), losses.detach()), off(made, wanted)]


def main():
    torch.manual_seed(0)
    found = {}
    for name, dtype in DTYPES.items():
        for classes in (7, row_kernels.BLOCK, row_kernels.BLOCK + 137):
            found[f"{name} {classes}"] = errors((5 * torch.randn(ROWS, classes)).to(dtype))
    wide = 5 * torch.randn(ROWS, 64)
    found["rows of a wider table"] = errors(wide[:, :50])
    far = 5 * torch.randn(ROWS, 64 * row_kernels.MOST_PADDING)
    found["rows far apart"] = errors(far[:, :50])
    found["columns"] = errors((5 * torch.randn(50, ROWS)).t())
    hidden = 5 * torch.randn(ROWS, row_kernels.BLOCK + 9)
    hidden[:, 1::2], hidden[:, row_kernels.BLOCK :] = float("-inf"), float("-inf")
    hidden[torch.arange(ROWS), torch.arange(ROWS) * (hidden.shape[1] // ROWS)] = 1.0
    found["hidden classes"] = errors(hidden)
    found["can run"] = row_kernels.can_run(torch.device("cpu"))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
