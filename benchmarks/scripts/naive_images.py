"""Train an image classifier on made-up images, written as a first version is: fp32, channels first.

python naive_images.py --model resnet50 --batch-size 256
python naive_images.py --model vit --batch-size 256
python naive_images.py --model resnet18 --side 32 --classes 10 --batch-size 512
"""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset


def convolution(before, after, taps, stride=1):
    """Return a convolution with its normalisation."""
    return nn.Sequential(
        nn.Conv2d(before, after, taps, stride, taps // 2, bias=False), nn.BatchNorm2d(after)
    )


class Basic(nn.Module):
    """Two convolutions and a shortcut."""

    widening = 1

    def __init__(self, before, width, stride):
        super().__init__()
        self.one = convolution(before, width, 3, stride)
        self.two = convolution(width, width, 3)
        is_plain = stride == 1 and before == width
        self.short = nn.Identity() if is_plain else convolution(before, width, 1, stride)

    def forward(self, x):
        return torch.relu(self.two(torch.relu(self.one(x))) + self.short(x))


class Bottleneck(nn.Module):
    """A narrow convolution between two of one tap, and a shortcut."""

    widening = 4

    def __init__(self, before, width, stride):
        super().__init__()
        after = width * self.widening
        self.one = convolution(before, width, 1)
        self.two = convolution(width, width, 3, stride)
        self.three = convolution(width, after, 1)
        is_plain = stride == 1 and before == after
        self.short = nn.Identity() if is_plain else convolution(before, after, 1, stride)

    def forward(self, x):
        y = torch.relu(self.two(torch.relu(self.one(x))))
        return torch.relu(self.three(y) + self.short(x))


class ResNet(nn.Module):
    """The residual networks of He et al.; small images get a small stem, as on CIFAR."""

    def __init__(self, block, counts, side, classes, width=64):
        super().__init__()
        if side <= 64:
            self.stem = nn.Sequential(convolution(3, width, 3), nn.ReLU())
        else:
            self.stem = nn.Sequential(convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        layers, before = [], width
        for stage, count in enumerate(counts):
            for number in range(count):
                stride = 2 if number == 0 and stage > 0 else 1
                layers.append(block(before, width * 2**stage, stride))
                before = width * 2**stage * block.widening
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(before, classes)

    def forward(self, x):
        return self.head(self.layers(self.stem(x)).mean(dim=(2, 3)))


class Encoder(nn.Module):
    """A block of the vision transformer, attention written out."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        batch, length, width = x.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // self.heads)
        y = functional.softmax(scores, dim=-1) @ v
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """The vision transformer of Dosovitskiy et al."""

    def __init__(self, side, classes, patch=16, width=768, layers=12, heads=12):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.ModuleList(Encoder(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def make_model(args):
    """Return the model that was asked for."""
    if args.model == "vit":
        sizes = {"width": args.width, "layers": args.layers, "heads": max(args.width // 64, 1)}
        return ViT(args.side, args.classes, **sizes)
    if args.model == "resnet18":
        return ResNet(Basic, (2, 2, 2, 2), args.side, args.classes)
    return ResNet(Bottleneck, (3, 4, 6, 3), args.side, args.classes)


def parse_arguments():
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=["resnet18", "resnet50", "vit"], default="resnet50")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--width", type=int, default=768, help="of the vision transformer")
    parser.add_argument("--layers", type=int, default=12, help="of the vision transformer")
    parser.add_argument("--batches", type=int, default=8, help="batches of made-up images")
    parser.add_argument("--on-device", action="store_true", help="the images lie there already")
    parser.add_argument("--steps", type=int, default=100_000)
    return parser.parse_args()


def parts(args):
    """Return the data set, in memory, and the model."""
    torch.manual_seed(0)
    labels = torch.randint(args.classes, (args.batches * args.batch_size,))
    # Each class has its own blotches of colour: on noise alone there is nothing to be learned.
    blotches = torch.randn(args.classes, 3, 4, 4)[labels]
    images = functional.interpolate(blotches, (args.side, args.side), mode="bilinear")
    images += 0.3 * torch.randn_like(images)
    return TensorDataset(images, labels), make_model(args)


def loss_of(logits, targets):
    """Return the mean over all images."""
    return functional.cross_entropy(logits, targets)


def main():
    """Train until the steps are made."""
    args = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Hundreds of millions of random numbers: where they are to lie, they are made the fastest.
    with torch.device(device if args.on_device else "cpu"):
        data, model = parts(args)
    model = model.to(device)
    if args.on_device:
        batches = BatchSampler(RandomSampler(data), args.batch_size, drop_last=True)
        loader = DataLoader(data, sampler=batches, batch_size=None)
    else:
        loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    while step < args.steps:
        for images, targets in loader:
            images, targets = images.to(device), targets.to(device)
            loss = loss_of(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 100 == 0:
                print(step, loss.item())
            if step == args.steps:
                break


if __name__ == "__main__":
    main()
