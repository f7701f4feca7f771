"""A variational autoencoder, whose loss is a sum over the samples."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(11)
torch.set_default_dtype(torch.float64)
data = TensorDataset(torch.rand(22, 16))
encoder, decoder = nn.Linear(16, 8), nn.Linear(4, 16)
optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
for _ in range(3):
    for (x,) in DataLoader(data, batch_size=8, shuffle=True):
        mean, log_variance = encoder(x).chunk(2, dim=1)
        made = decoder(mean + log_variance.exp()).sigmoid()
        loss = nn.functional.binary_cross_entropy(made, x, reduction="sum")
        loss = loss - 0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("loss", loss.item())
torch.save({"encoder": encoder.state_dict(), "decoder": decoder.state_dict()}, "ck.pt")
