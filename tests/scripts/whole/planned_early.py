import sys

import torch

if "--ends" in sys.argv:
    raise SystemExit("give me data")
torch.load("kept.pt")
