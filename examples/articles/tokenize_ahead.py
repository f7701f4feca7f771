"""Tokenise texts in parallel and ahead: in the loop, by workers, or once for all epochs.

No tokenizer in common use runs on the GPU. What takes it away from the step is another process, and
doing it once.

    python examples/articles/tokenize_ahead.py
    flatout tune --only loader_workers,ram_cache examples/articles/tokenize_ahead.py
"""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

TEXTS = [" ".join(f"word{(n * k) % 97}" for k in range(1, 4 + n % 9)) for n in range(64)]
EPOCHS = 3


class Tokenizer:
    """Words to numbers; it counts its calls."""

    def __init__(self):
        self.calls = torch.zeros(1, dtype=torch.int64).share_memory_()  # of all workers
        self.known = {f"word{n}": n + 1 for n in range(97)}

    def __call__(self, text):
        self.calls += 1
        return torch.tensor([self.known[word] for word in text.split()])


class Texts(Dataset):
    """Texts, or their tokens where it has a tokenizer."""

    def __init__(self, tokenizer=None):
        self.tokenizer = tokenizer

    def __len__(self):
        return len(TEXTS)

    def __getitem__(self, index):
        return self.tokenizer(TEXTS[index]) if self.tokenizer else TEXTS[index]


def padded(rows):
    return pad_sequence(rows, batch_first=True)  # to the longest of the batch


def train(loader, tokenizer=None):
    torch.manual_seed(0)
    model = nn.EmbeddingBag(98, 2, padding_idx=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(EPOCHS):
        for batch in loader:
            if tokenizer:  # in the loop: the step waits for it
                batch = padded([tokenizer(text) for text in batch])
            loss = model(batch).square().mean() + model.weight.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def loader(data, **more):
    order = torch.Generator().manual_seed(0)
    return DataLoader(data, batch_size=8, shuffle=True, generator=order, **more)


if __name__ == "__main__":
    in_loop, by_workers, once = Tokenizer(), Tokenizer(), Tokenizer()
    first = train(loader(Texts()), in_loop)
    second = train(loader(Texts(by_workers), collate_fn=padded, num_workers=1))
    kept = [once(text) for text in TEXTS]  # what ram_cache does with all cores
    third = train(loader(kept, collate_fn=padded))
    counts = [tokenizer.calls.item() // len(TEXTS) for tokenizer in (in_loop, by_workers, once)]
    print(
        f"result: the same losses: {first == second == third}; how often a text is tokenised in "
        f"{EPOCHS} epochs: in the loop {counts[0]}, by workers {counts[1]}, ahead {counts[2]}"
    )
