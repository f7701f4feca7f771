"""Train a byte-level GPT whose attention is written out, as in many tutorials.

    python train.py --epochs 2 --out runs/gpt

Another text: --data FOLDER, every .py and .txt file below it is read.
"""

import argparse
import json
import math
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and with a shortcut."""

    def __init__(self, context, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.register_buffer("mask", torch.tril(torch.ones(context, context))[None, None])
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        batch, time_steps, width = x.size()
        q, k, v = self.qkv(self.norm1(x)).split(width, dim=2)
        shape = (batch, time_steps, self.heads, width // self.heads)
        q = q.view(shape).transpose(1, 2)
        k = k.view(shape).transpose(1, 2)
        v = v.view(shape).transpose(1, 2)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.mask[:, :, :time_steps, :time_steps] == 0, float("-inf"))
        y = functional.softmax(scores, dim=-1) @ v
        x = x + self.out(y.transpose(1, 2).reshape(batch, time_steps, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder over the 256 byte values."""

    def __init__(self, context, layers, width, heads):
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(context, width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            if name.endswith(("out.weight", "mlp.2.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_text(folder, limit):
    """Return the bytes of the source files below a folder, in a fixed order."""
    text = bytearray()
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".py", ".txt") and "site-packages" not in path.parts:
            text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def get_batch(text, batch_size, context, device):
    """Return random pieces of the text and the same shifted by one byte."""
    starts = torch.randint(len(text) - context - 1, (batch_size,))
    pieces = torch.stack([text[start : start + context + 1] for start in starts]).long()
    pieces = pieces.to(device)
    return pieces[:, :-1], pieces[:, 1:]


def write_log(path, step, step_ms):
    """Append the time of a step to the log, where one is wanted."""
    if path:
        with path.open("a") as log:
            log.write(json.dumps({"step": step, "step_ms": step_ms}) + "\n")


@torch.no_grad()
def evaluate(model, text, args, device):
    """Return the mean loss over a few batches of held-out text."""
    model.eval()
    batches = [get_batch(text, args.batch_size, args.context, device) for _ in range(args.evals)]
    losses = [model(tokens, targets).item() for tokens, targets in batches]
    model.train()
    return sum(losses) / len(losses)


def parse_arguments():
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    library = Path(sysconfig.get_path("stdlib"))
    parser.add_argument("--data", type=Path, default=library, help="folder of text files")
    parser.add_argument("--limit", type=int, default=4_000_000, help="bytes of text to read")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--epoch-steps", type=int, default=500)
    parser.add_argument("--steps", type=int, default=0, help="stop after this many; 0: no limit")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--evals", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--log", type=Path, help="append the time of each step here")
    parser.add_argument("--out", type=Path, default=Path("runs/naive_attention"))
    return parser.parse_args()


def main():
    """Train and evaluate."""
    args = parse_arguments()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    text = read_text(args.data, args.limit)
    held_out = len(text) // 10
    train_text, val_text = text[held_out:], text[:held_out]
    model = GPT(args.context, args.layers, args.width, args.heads).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    count = sum(parameter.numel() for parameter in model.parameters())
    args.out.mkdir(parents=True, exist_ok=True)
    print(f"{len(train_text)} bytes of text, {count} parameters, on {device}")

    step, best = 0, math.inf
    for epoch in range(args.epochs):
        before = time.perf_counter()
        for _ in range(args.epoch_steps):
            tokens, targets = get_batch(train_text, args.batch_size, args.context, device)
            loss = model(tokens, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            now = time.perf_counter()
            step_ms, before = 1e3 * (now - before), now
            write_log(args.log, step, step_ms)
            if step % args.log_every == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f} {step_ms:.0f} ms")
            if step == args.steps:
                break
        val_loss = evaluate(model, val_text, args, device)
        print(f"epoch {epoch} validation loss {val_loss:.4f}")
        if val_loss < best:
            best = val_loss
            torch.save({"model": model.state_dict(), "step": step}, args.out / "checkpoint.pt")
        if step == args.steps:
            break


if __name__ == "__main__":
    main()
