"""GEMM is C = alpha A B + beta C: one call, and a linear layer is one with its bias.

Tiles change the order of its additions, not its result.

    python examples/articles/gemm.py
    flatout demo tiling          # why the library's is so fast: naive, tiled, in registers
    flatout roofline train.py    # how near each product of a model comes to the machine's peak
"""

import torch

torch.manual_seed(0)
A, B, C = torch.randn(64, 32), torch.randn(32, 48), torch.randn(64, 48)
one = torch.addmm(C, A, B, alpha=2.0, beta=0.5)
layer = torch.nn.Linear(32, 48)
same = torch.allclose(one, 2.0 * (A @ B) + 0.5 * C, atol=1e-5)
linear = torch.allclose(layer(A), torch.addmm(layer.bias, A, layer.weight.T), atol=1e-5)
tiles = torch.zeros(64, 48)
for i in range(0, 64, 16):
    for j in range(0, 48, 16):
        for k in range(0, 32, 16):  # each tile of A and B is used 16 times while it is in the cache
            tiles[i : i + 16, j : j + 16] += A[i : i + 16, k : k + 16] @ B[k : k + 16, j : j + 16]
print(
    f"result: one call for alpha A B + beta C: {same}; "
    f"a linear layer is one: {linear}; "
    f"so are its tiles: {torch.allclose(tiles, A @ B, atol=1e-5)}"
)
