import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("habit")
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
images, labels = torch.randn(64, 1, 8, 8), torch.randint(0, 10, (64,))
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
judge = nn.Linear(10, 1).to(device)
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(images, labels), 64)


def writes(loss):
    print(f"{loss:.3f} {loss.detach():>8}", format(loss, ".2f"))


def saves(_):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, "state.pt")
    model.load_state_dict(torch.load("state.pt", map_location=device)["model"])


def evaluates(_):
    with torch.inference_mode():
        right = sum((model(x.to(device)).argmax(1) == y.to(device)).sum().item() for x, y in loader)
    print(100 * right / 64)


def draws(_):
    generator = torch.Generator(device=device).manual_seed(1)
    with torch.cuda.device(device):
        noise = torch.randn(3, device=device, generator=generator)
    assert isinstance(torch.default_generator, torch.Generator)
    print(noise.sum().item())


def resumes(_):
    kept = torch.load("kept.pt", map_location=device)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    assert kept["model"]["1.weight"].device.type == device.type


def scatters(_):
    nn.DataParallel(model)(images.to(device))


def breaks(_):
    raise ValueError("the plot is upside down")


def nothing(_):
    pass


for _epoch in range(args.epochs):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        globals()[args.habit](loss)
