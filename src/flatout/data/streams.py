"""The random streams of a process: where they stand, and back there."""

import hashlib
import pickle
import random

import numpy as np
import torch


class Streams:
    """Where the global streams of torch, Python and numpy stood when this was made."""

    def __init__(self) -> None:
        self.torch = torch.default_generator.get_state()
        self.python = random.getstate()
        self.numpy = np.random.get_state()

    def digest(self) -> str:
        """Return a short name of where they stood."""
        parts = (self.torch.numpy().tobytes(), self.python, self.numpy)
        return hashlib.blake2b(pickle.dumps(parts), digest_size=16).hexdigest()

    def set_back(self) -> None:
        """Put them there again. A forked copy needs it: Python seeds `random` anew there."""
        torch.default_generator.set_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)
