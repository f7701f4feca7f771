"""Every way to make the host wait, each on a line of its own, in the loop and elsewhere."""

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        return torch.tensor(float(torch.ones(4).sum().item())).repeat(8), index % 2  # loading


def evaluate(net, x):
    net.eval()
    with torch.no_grad():
        correct = net(x).argmax(1).sum().item()  # evaluation
    net.train()
    return correct


def main():
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(net.parameters())
    steps = 0
    for _ in range(20):
        for x, y in DataLoader(Numbers(), batch_size=8):
            optimizer.zero_grad()
            out = net(x)
            loss = nn.functional.cross_entropy(out, y)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            loss.item(), loss.item()  # twice
            if loss > 100:  # bool
                raise SystemExit
            float(loss)  # float
            print(out)  # print
            f"{loss:.3f}"  # format
            out.detach().cpu().numpy()  # both
            np.asarray(y)  # array
            out.argmax(1).tolist()  # list
            out[y == 1]  # mask
            out[0], out[:, 1], out[torch.tensor([0, 1])]  # no mask
            torch.nonzero(y)  # nonzero
            torch.unique(y)  # unique
            steps += 1
            if steps % 5 == 0:
                evaluate(net, x)
    print("done")


main()
