"""The same training as train.py beside it, tuned by hand: bf16 autocast and fused AdamW.

What an expert reaches is the reference that the tuner is compared with.
"""

import time

import torch
from train import GPT, get_batch, parse_arguments, read_text, write_log


def main():
    """Train."""
    args = parse_arguments()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    text = read_text(args.data, args.limit)
    train_text = text[len(text) // 10 :]
    model = GPT(args.context, args.layers, args.width, args.heads).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)

    before = time.perf_counter()
    for step in range(1, (args.steps or args.epochs * args.epoch_steps) + 1):
        tokens, targets = get_batch(train_text, args.batch_size, args.context, device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        now = time.perf_counter()
        step_ms, before = 1e3 * (now - before), now
        write_log(args.log, step, step_ms)
        if step % args.log_every == 0:
            print(f"step {step} loss {loss.item():.4f} {step_ms:.0f} ms")


if __name__ == "__main__":
    main()
