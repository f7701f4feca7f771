import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--own-batches", action="store_true")
parser.add_argument("--fails", action="store_true")
parser.add_argument("--on-host", action="store_true")
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() and not args.on_host else "cpu"
images, labels = torch.randn(128, 3, 16, 16), torch.randint(0, 10, (128,))
model = nn.Sequential(nn.Flatten(), nn.Linear(768, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.AdamW(model.parameters())
model.to(device)
scaler = torch.amp.GradScaler(device)
loader = DataLoader(
    TensorDataset(images, labels), args.batch, shuffle=True, num_workers=2, pin_memory=True
)
if args.own_batches:
    loader = [(images[:8], labels[:8])] * 9
with open("started.txt", "w") as log:
    log.write("here")
for epoch in range(2):
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device)
        if args.fails:
            raise ValueError("the images are upside down")
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16, enabled=device == "cuda"):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        print(epoch, loss.item(), (model(x).argmax(1) == y).float().mean().item())
    torch.save(model.state_dict(), "model.pt")
