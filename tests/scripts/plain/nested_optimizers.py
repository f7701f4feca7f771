"""An optimizer that steps another one inside its own step, and an evaluation after each epoch."""

import torch
from torch.utils.data import DataLoader, TensorDataset

STEPS = 240


class Lookahead(torch.optim.Optimizer):
    """Steps the inner optimizer, and every fifth time goes half the way back."""

    def __init__(self, inner):
        super().__init__(inner.param_groups[0]["params"], {})
        self.inner, self.made = inner, 0
        self.slow = [p.detach().clone() for p in inner.param_groups[0]["params"]]

    def step(self, closure=None):
        loss = self.inner.step(closure)
        self.made += 1
        if self.made % 5 == 0:
            with torch.no_grad():
                for slow, fast in zip(self.slow, self.param_groups[0]["params"], strict=True):
                    slow.lerp_(fast, 0.5)
                    fast.copy_(slow)
        return loss


torch.manual_seed(0)
x = torch.randn(960, 16)
loader = DataLoader(TensorDataset(x, x[:, :1]), batch_size=32)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.01))
step = 0
while step < STEPS:
    for features, target in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(features), target).backward()
        optimizer.step()
        step += 1
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()
