"""A language model whose vocabulary is far larger than the rest of it."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

VOCAB = 32_000


class Tokens(Dataset):
    def __init__(self):
        self.ids = torch.randint(VOCAB, (512, 65))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i, :-1], "labels": self.ids[i, 1:]}


class LM(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, input_ids, labels):
        hidden, _ = self.rnn(self.embed(input_ids))
        logits = self.lm_head(hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main():
    model = LM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        for batch in DataLoader(Tokens(), batch_size=8, shuffle=True):
            loss = model(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
