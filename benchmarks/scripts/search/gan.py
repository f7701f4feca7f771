"""Train a DCGAN: two networks, two optimizers, one batch a step."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, BATCH = (4, 4) if "tiny" in sys.argv else (32, 32)
torch.manual_seed(0)
real_pictures = TensorDataset(torch.rand(2048, 3, 32, 32) * 2 - 1)
generator = nn.Sequential(
    nn.ConvTranspose2d(64, 4 * WIDTH, 4),
    nn.BatchNorm2d(4 * WIDTH),
    nn.ReLU(),
    nn.ConvTranspose2d(4 * WIDTH, 2 * WIDTH, 4, 2, 1),
    nn.BatchNorm2d(2 * WIDTH),
    nn.ReLU(),
    nn.ConvTranspose2d(2 * WIDTH, WIDTH, 4, 2, 1),
    nn.BatchNorm2d(WIDTH),
    nn.ReLU(),
    nn.ConvTranspose2d(WIDTH, 3, 4, 2, 1),
    nn.Tanh(),
)
critic = nn.Sequential(
    nn.Conv2d(3, WIDTH, 4, 2, 1),
    nn.LeakyReLU(0.2),
    nn.Conv2d(WIDTH, 2 * WIDTH, 4, 2, 1),
    nn.BatchNorm2d(2 * WIDTH),
    nn.LeakyReLU(0.2),
    nn.Flatten(),
    nn.Linear(2 * WIDTH * 64, 1),
)
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
of_critic = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
loss_of = nn.BCEWithLogitsLoss()
for _ in range(1000):
    for (real,) in DataLoader(real_pictures, batch_size=BATCH, shuffle=True, drop_last=True):
        ones, zeros = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)
        made = generator(torch.randn(BATCH, 64, 1, 1))
        of_critic.zero_grad()
        loss = loss_of(critic(real), ones) + loss_of(critic(made.detach()), zeros)
        loss.backward()
        of_critic.step()
        of_generator.zero_grad()
        loss_of(critic(made), ones).backward()
        of_generator.step()
