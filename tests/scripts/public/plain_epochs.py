"""Train a small CNN: epochs, evaluation, a scheduler, best checkpoint, a log file."""

import argparse
import json
import logging
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
log = logging.getLogger(__name__)


class Shapes(Dataset):
    """Noisy pictures of a bright corner; the corner is the class."""

    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 4, (size,), generator=generator)
        self.noise = torch.randn(size, 1, 16, 16, generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image, label = self.noise[index].clone(), int(self.labels[index])
        row, column = 8 * (label // 2), 8 * (label % 2)
        image[:, row : row + 8, column : column + 8] += 1.0
        return image, label


class Net(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(2 * width * 16, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc(self.dropout(torch.flatten(x, 1)))


def train(args, model, device, loader, optimizer, epoch, losses):
    model.train()
    for step, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % args.log_interval == 0:
            log.info("epoch %d step %d/%d loss %.4f", epoch, step, len(loader), loss.item())


@torch.no_grad()
def evaluate(model, device, loader):
    model.eval()
    correct = 0
    for data, target in loader:
        prediction = model(data.to(device)).argmax(1)
        correct += (prediction == target.to(device)).sum().item()
    return correct / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description="Corner classification")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--test-batch-size", type=int, default=64)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--output-dir", default="output")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    os.makedirs(args.output_dir, exist_ok=True)
    train_loader = DataLoader(Shapes(256, 0), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(Shapes(128, 1), batch_size=args.test_batch_size)
    model = Net(args.width, args.dropout).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)

    losses, best = [], -1.0
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch, losses)
        accuracy = evaluate(model, device, test_loader)
        scheduler.step()
        log.info("epoch %d accuracy %.3f", epoch, accuracy)
        if accuracy > best:
            best = accuracy
            torch.save(model.state_dict(), os.path.join(args.output_dir, "best.pt"))
    with open(os.path.join(args.output_dir, "losses.json"), "w") as file:
        json.dump(losses, file)


if __name__ == "__main__":
    main()
