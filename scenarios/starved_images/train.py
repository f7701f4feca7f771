"""Train a small ResNet on a folder of images, one folder per class.

    python train.py --data photographs --epochs 5 --out runs/resnet

The images are read, rotated, cropped, jittered and flipped one by one in the training process.
"""

import argparse
import random
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageEnhance
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

MEAN = np.array([0.485, 0.456, 0.406], dtype=np.float32)
STD = np.array([0.229, 0.224, 0.225], dtype=np.float32)


class Block(nn.Module):
    """Two 3x3 convolutions with a shortcut."""

    def __init__(self, channels_in, channels, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        nn.init.zeros_(self.norm2.weight)  # each block starts as its shortcut
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False),
                nn.BatchNorm2d(channels),
            )

    def forward(self, x):
        y = functional.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return functional.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """A ResNet-10: one block per stage."""

    def __init__(self, classes, width):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.stages = nn.Sequential(
            Block(width, width, 1),
            Block(width, 2 * width, 2),
            Block(2 * width, 4 * width, 2),
            Block(4 * width, 8 * width, 2),
        )
        self.head = nn.Linear(8 * width, classes)

    def forward(self, x):
        x = functional.max_pool2d(functional.relu(self.norm(self.stem(x))), 3, 2, padding=1)
        return self.head(self.stages(x).mean(dim=(2, 3)))


def random_resized_crop(image, size):
    """Cut a random part of 30-100 % of the area and scale it to a square."""
    width, height = image.size
    side = (width * height * random.uniform(0.3, 1.0)) ** 0.5
    aspect = random.uniform(3 / 4, 4 / 3) ** 0.5
    w, h = min(width, side * aspect), min(height, side / aspect)
    x, y = random.uniform(0, width - w), random.uniform(0, height - h)
    box = (x, y, x + w, y + h)
    return image.resize((size, size), Image.Resampling.BICUBIC, box=box)


def colour_jitter(image, strength=0.4, hue=0.1):
    """Change brightness, contrast and saturation, in random order, and turn the hue."""
    enhancers = [ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color]
    random.shuffle(enhancers)
    for enhancer in enhancers:
        image = enhancer(image).enhance(random.uniform(1 - strength, 1 + strength))
    turned, saturation, value = image.convert("HSV").split()
    shift = round(255 * random.uniform(-hue, hue)) % 256
    turned = Image.fromarray(np.asarray(turned) + np.uint8(shift))
    return Image.merge("HSV", (turned, saturation, value)).convert("RGB")


def centre_crop(image, size):
    """Scale the short side to 8/7 of the size and cut the middle."""
    scale = size * 8 / 7 / min(image.size)
    image = image.resize([max(size, round(side * scale)) for side in image.size])
    x, y = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((x, y, x + size, y + size))


class ImageFolder(Dataset):
    """Images below `root`, labelled by their folder's name."""

    def __init__(self, paths, classes, size, train):
        self.paths, self.classes, self.size, self.train = paths, classes, size, train

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path = self.paths[index]
        image = Image.open(path).convert("RGB")
        if self.train:
            image = image.rotate(random.uniform(-10, 10), Image.Resampling.BILINEAR)
            image = colour_jitter(random_resized_crop(image, self.size))
            if random.random() < 0.5:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        else:
            image = centre_crop(image, self.size)
        pixels = (np.asarray(image, dtype=np.float32) / 255 - MEAN) / STD
        label = self.classes.index(path.parent.name)
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))), label


@torch.no_grad()
def evaluate(model, loader, device):
    """Return loss and accuracy on the validation images."""
    model.eval()
    loss, right, count = 0.0, 0, 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        logits = model(images)
        loss += functional.cross_entropy(logits, labels, reduction="sum").item()
        right += (logits.argmax(1) == labels).sum().item()
        count += len(labels)
    model.train()
    return loss / count, right / count


def main():
    """Train and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with one folder per class")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="stop after this many; 0: no limit")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--image-size", type=int, default=112)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--limit", type=int, default=0, help="use only this many images")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("runs/starved_images"))
    args = parser.parse_args()

    random.seed(args.seed)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    paths = sorted(p for p in args.data.glob("*/*") if p.suffix in (".jpg", ".png"))
    classes = sorted({path.parent.name for path in paths})
    random.Random(args.seed).shuffle(paths)
    paths = paths[: args.limit or None]
    held_out = max(1, len(paths) // 10)
    train_set = ImageFolder(paths[held_out:], classes, args.image_size, train=True)
    val_set = ImageFolder(paths[:held_out], classes, args.image_size, train=False)
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(val_set, args.batch_size)

    model = ResNet(len(classes), args.width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    args.out.mkdir(parents=True, exist_ok=True)
    print(f"{len(train_set)} training images, {len(val_set)} validation images, on {device}")

    step = 0
    for epoch in range(args.epochs):
        before = time.perf_counter()
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % args.log_every == 0:
                now = time.perf_counter()
                rate = args.log_every * args.batch_size / (now - before)
                before = now
                print(f"epoch {epoch} step {step} loss {loss.item():.4f} {rate:.0f} images/s")
            if step == args.steps:
                break
        val_loss, accuracy = evaluate(model, val_loader, device)
        print(f"epoch {epoch} validation loss {val_loss:.4f} accuracy {accuracy:.3f}")
        checkpoint = {"model": model.state_dict(), "epoch": epoch, "accuracy": accuracy}
        torch.save(checkpoint, args.out / "checkpoint.pt")
        if step == args.steps:
            break


if __name__ == "__main__":
    main()
