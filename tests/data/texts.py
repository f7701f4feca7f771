"""Texts of several lengths, and a tokenizer that is small enough to read."""

import torch
from torch.utils.data import Dataset

WORDS = ("a", "cat", "sat", "on", "the", "mat")


class Tokenizer:
    """Words to numbers from 1 on; 0 pads."""

    def get_vocab(self):
        return {word: number for number, word in enumerate(WORDS, start=1)}

    def __call__(self, text, width):
        numbers = [self.get_vocab()[word] for word in text.split()]
        pad = [0] * (width - len(numbers))
        return {
            "input_ids": torch.tensor(numbers + pad),
            "attention_mask": torch.tensor([1] * len(numbers) + pad),
        }


class Texts(Dataset):
    """Texts of 1 to 6 words, padded to a width."""

    def __init__(self, count=24, width=32):
        self.texts = [" ".join(WORDS[: 1 + number % 6]) for number in range(count)]
        self.tokenizer = Tokenizer()
        self.width = width

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        tokens = self.tokenizer(self.texts[index], self.width)
        labels = tokens["input_ids"].masked_fill(tokens["attention_mask"] == 0, -100)
        return {**tokens, "labels": labels, "number": index}
