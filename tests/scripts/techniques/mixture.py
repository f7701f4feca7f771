"""A small language model whose experts are computed in a loop with masks."""

import torch
from torch import nn
from torch.nn import functional


class Mixture(nn.Module):
    def __init__(self, width=32, count=8, top_k=2):
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(count)
        )

    def forward(self, x):
        shares = self.router(x).softmax(dim=-1)
        weights, chosen = shares.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            hit = chosen == number
            rows = hit.any(dim=-1)
            if rows.any():
                weight = (weights * hit).sum(dim=-1)[rows]
                out[rows] += weight.unsqueeze(-1) * expert(x[rows])
        return out


class Model(nn.Module):
    def __init__(self, vocabulary=64, width=32):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Mixture(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def main():
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    texts = torch.utils.data.TensorDataset(torch.randint(64, (512, 17)))
    for _ in range(3):
        for (rows,) in torch.utils.data.DataLoader(texts, batch_size=8, shuffle=True):
            logits = model(rows[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
