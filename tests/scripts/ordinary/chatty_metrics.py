"""A classifier whose loop keeps its own confusion matrix, number by number."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(8192, 64), torch.randint(0, 10, (8192,))
loader = DataLoader(TensorDataset(x, y), batch_size=128, shuffle=True)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()
confusion = [[0] * 10 for _ in range(10)]

for epoch in range(20):
    total, correct = 0.0, 0
    for inputs, targets in loader:
        outputs = model(inputs)
        loss = criterion(outputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        for i in range(len(targets)):
            guess = outputs[i].argmax().item()
            confusion[targets[i].item()][guess] += 1
            correct += int(guess == targets[i].item())
    print(epoch, total / len(loader), correct / len(x))
