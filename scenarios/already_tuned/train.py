"""Train an MLP that predicts the next byte of Python's standard library from those before it.

    python train.py --epochs 2 --out runs/mlp

The usual advice is already followed: the text is in memory, the matrix products are large and run
in bf16 where the hardware multiplies bf16, the optimizer is fused, and glibc keeps freed memory
instead of giving it back to the system and faulting it in again with every step.
"""

import argparse
import contextlib
import ctypes
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional


class NextByte(nn.Module):
    """Embeds the last bytes side by side and guesses the next one."""

    def __init__(self, context, embedding, width):
        super().__init__()
        self.embedding = nn.Embedding(256, embedding)
        self.layers = nn.Sequential(
            nn.Linear(context * embedding, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 256),
        )

    def forward(self, tokens):
        return self.layers(self.embedding(tokens).flatten(1))


def read_text(folder, limit):
    """Return the bytes of the source files below a folder, in a fixed order."""
    text = bytearray()
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".py", ".txt") and "site-packages" not in path.parts:
            text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def get_batch(windows, batch_size):
    """Return random pieces of the text and the byte that follows each."""
    pieces = windows[torch.randint(len(windows), (batch_size,), device=windows.device)].long()
    return pieces[:, :-1], pieces[:, -1]


def multiplies_bf16(device):
    """Return whether this hardware is built for bf16; elsewhere it would be slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text() if cpuinfo.exists() else ""
    return "amx_bf16" in flags or "avx512_bf16" in flags


def keep_freed_memory():
    """Set glibc's allocator as MALLOC_MMAP_MAX_=0 and its relatives do; nothing elsewhere."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return
    trim_threshold, top_pad, mmap_max = -1, -2, -4
    set_option(mmap_max, 0)
    set_option(trim_threshold, 2**31 - 1)
    set_option(top_pad, 64 * 2**20)


@torch.no_grad()
def evaluate(model, windows, precision):
    """Return loss and accuracy on held-out text."""
    model.eval()
    with precision():
        logits = model(windows[:, :-1].long())
    targets = windows[:, -1].long()
    model.train()
    loss = functional.cross_entropy(logits.float(), targets).item()
    return loss, (logits.argmax(1) == targets).float().mean().item()


def main():
    """Train and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    library = Path(sysconfig.get_path("stdlib"))
    parser.add_argument("--data", type=Path, default=library, help="folder of text files")
    parser.add_argument("--limit", type=int, default=4_000_000, help="bytes of text to read")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--epoch-steps", type=int, default=500)
    parser.add_argument("--steps", type=int, default=0, help="stop after this many; 0: no limit")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--embedding", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("runs/already_tuned"))
    args = parser.parse_args()

    keep_freed_memory()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = contextlib.nullcontext
    if multiplies_bf16(device):

        def precision():
            return torch.autocast(device.type, torch.bfloat16)

    text = read_text(args.data, args.limit).to(device)
    held_out = len(text) // 10
    train_windows = text[held_out:].unfold(0, args.context + 1, 1)
    val_windows = text[:held_out].unfold(0, args.context + 1, 199)
    model = NextByte(args.context, args.embedding, args.width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    args.out.mkdir(parents=True, exist_ok=True)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(train_windows)} samples, {count} parameters, on {device}")

    step = 0
    for epoch in range(args.epochs):
        before = time.perf_counter()
        for _ in range(args.epoch_steps):
            tokens, targets = get_batch(train_windows, args.batch_size)
            with precision():
                logits = model(tokens)
            loss = functional.cross_entropy(logits.float(), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % args.log_every == 0:
                now = time.perf_counter()
                step_ms, before = 1e3 * (now - before) / args.log_every, now
                print(f"epoch {epoch} step {step} loss {loss.item():.4f} {step_ms:.0f} ms a step")
            if step == args.steps:
                break
        val_loss, accuracy = evaluate(model, val_windows, precision)
        print(f"epoch {epoch} validation loss {val_loss:.4f} accuracy {accuracy:.3f}")
        torch.save({"model": model.state_dict(), "epoch": epoch}, args.out / "checkpoint.pt")
        if step == args.steps:
            break


if __name__ == "__main__":
    main()
