"""Fine-tune a small causal model of transformers on texts of many lengths, tokenised as they come.

python naive_texts.py --pad fixed
"""

import argparse
import random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT = 128
PAD, EMPTY = "[PAD]", -100
"""The token of the padding, and the label that a loss leaves out."""


def made_texts(count):
    """Return texts of common and rare words; most are short, a few fill the context."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=7)) for _ in range(3000)]
    lengths = [min(CONTEXT, max(4, int(rng.lognormvariate(3.2, 0.7)))) for _ in range(count)]
    return [" ".join(rng.choices(words[: 10 * length], k=length)) for length in lengths]


def made_tokenizer(texts):
    """Return a tokenizer of byte pairs that learned from the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=4000, special_tokens=[PAD], show_progress=False)
    )
    return tokenizer


class Texts(Dataset):
    """Texts that are tokenised each time they are asked for."""

    def __init__(self, texts, tokenizer, pads):
        self.texts, self.tokenizer, self.pads = texts, tokenizer, pads

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        tokens = self.tokenizer.encode(self.texts[index]).ids[:CONTEXT]
        missing = CONTEXT - len(tokens) if self.pads else 0
        return {
            "input_ids": torch.tensor(tokens + [0] * missing),
            "attention_mask": torch.tensor([1] * len(tokens) + [0] * missing),
            "labels": torch.tensor(tokens + [EMPTY] * missing),
        }


def to_longest(rows):
    """Pad the samples of a batch to its longest."""
    return {
        name: torch.nn.utils.rnn.pad_sequence(
            [row[name] for row in rows],
            batch_first=True,
            padding_value=EMPTY if name == "labels" else 0,
        )
        for name in rows[0]
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--pad", choices=("fixed", "longest"), default="fixed")
    parser.add_argument("--texts", type=int, default=4000)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--width", type=int, default=192)
    args = parser.parse_args()
    torch.manual_seed(0)
    texts = made_texts(args.texts)
    tokenizer = made_tokenizer(texts[:1000])
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=args.width,
            intermediate_size=3 * args.width,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=CONTEXT,
            use_cache=False,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loader = DataLoader(
        Texts(texts, tokenizer, args.pad == "fixed"),
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        collate_fn=to_longest if args.pad == "longest" else None,
    )
    for epoch in range(100):
        for batch in loader:
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
