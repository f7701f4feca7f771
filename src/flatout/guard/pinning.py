"""Switches of a guard trial, the same on both sides: what chance decides is taken out.

Each returns a function that switches back. All must be set right after torch was imported, in
every process that imports it (spawned loader workers too).
"""

import functools
import hashlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

DROPOUTS = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
"""Functions of `torch` that every dropout of `torch.nn` ends in; each has an in-place twin whose
name ends in an underscore. All take the input, the rate and whether it is training."""
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
RECURRENT_RATE = 5
"""Place of the dropout rate in torch's recurrent functions: input, state, weights, whether there
are biases, number of layers, rate. With packed sequences the batch sizes come second."""
ATTENTION_RATE = 4
"""Place of the dropout rate in attention: query, key, value, mask, rate."""
RRELU_TRAINING = 3
"""Place of the training flag in `rrelu`: input, lower, upper, flag."""

Undo = Callable[[], None]


def pin_samples(seed: int) -> Undo:
    """Make each sample depend on its index alone, not on the worker that makes it.

    Around each `dataset[index]` the global streams of torch, `random` and numpy are seeded from the
    seed and the index (around `__getitems__` and the collation from all indices of the batch), and
    set back to where they were after the batch. A sample then looks the same in every epoch, which
    is fine for twenty steps. Iterable data sets have no index and are left alone, as are
    generators that a data set keeps for itself.
    """
    from torch.utils.data._utils import fetch as module

    kind: Any = module._MapDatasetFetcher
    original = kind.fetch

    @functools.wraps(original)
    def fetch(fetcher: Any, indices: Any) -> Any:
        dataset, collate = fetcher.dataset, fetcher.collate_fn
        fetcher.dataset = _Pinned(dataset, seed)
        fetcher.collate_fn = _pinned_collate(collate, seed, indices)
        try:
            with _streams_kept():
                return original(fetcher, indices)
        finally:
            fetcher.dataset, fetcher.collate_fn = dataset, collate

    kind.fetch = fetch
    return functools.partial(setattr, kind, "fetch", original)


class _Pinned:
    """A data set that seeds the global streams before each sample."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __getitem__(self, index: Any) -> Any:
        _reseed(self.seed, index)
        return self.dataset[index]

    @property
    def __getitems__(self) -> Any:
        many = getattr(self.dataset, "__getitems__", None)
        if not many:
            return None

        def pinned(indices: Any) -> Any:
            _reseed(self.seed, indices)
            return many(indices)

        return pinned


def _pinned_collate(collate: Any, seed: int, indices: Any) -> Callable[[Any], Any]:
    def pinned(samples: Any) -> Any:
        _reseed(seed, ("collate", indices))
        return collate(samples)

    return pinned


def _reseed(seed: int, key: Any) -> None:
    import torch

    digest = hashlib.blake2b(f"{seed}:{key!r}".encode(), digest_size=4).digest()
    number = int.from_bytes(digest, "little")
    torch.default_generator.manual_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


@contextmanager
def _streams_kept() -> Iterator[None]:
    """Set the process's random streams back at the end."""
    import torch

    numpy = sys.modules.get("numpy")
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        if numpy and numpy_state is not None:
            numpy.random.set_state(numpy_state)


def drop_dropout() -> Undo:
    """Switch every dropout of torch off by making its functions keep everything.

    The rates in the modules stay as they are: the guard compares them. Covered are `nn.Dropout` and
    its kin, the functional forms, `scaled_dot_product_attention`, multi-head attention, dropout
    between recurrent layers, and the random slopes of `rrelu`. Masks that a script draws by itself
    are not covered, and `torch.jit.script` cannot compile the replaced functions.
    """
    import torch
    from torch.nn import functional

    low_level: Any = torch._VF
    replaced = _Replaced()
    for owner in (torch, low_level):
        for name in DROPOUTS:
            replaced.put(owner, name, _keep_all)
            replaced.put(owner, f"{name}_", _keep_all_inplace)
    for owner, name in ((torch, "rrelu"), (torch, "rrelu_"), (functional, "rrelu_")):
        replaced.put(owner, name, _with_mean_slope)
    replaced.put(functional, "scaled_dot_product_attention", _without_rate)
    for name in RECURRENT:
        replaced.put(low_level, name, _without_rate_between_layers)
    return replaced.undo


def keep_random_compile() -> Undo:
    """Let compiled code draw its random numbers as eager code does.

    Inductor's own generator draws other masks from the same seed (a gradient 26 to 81 % away);
    with this switch compiled dropout matches like any other rounding.
    """
    from torch._inductor import config

    before = config.fallback_random
    config.fallback_random = True
    return functools.partial(setattr, config, "fallback_random", before)


class _Replaced:
    """Functions that were replaced, to be put back."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        self._originals.append((owner, name, original))
        setattr(owner, name, wrap(original))

    def undo(self) -> None:
        while self._originals:
            setattr(*self._originals.pop())


def _keep_all(original: Any) -> Any:
    def dropout(input: Any, p: float = 0.5, train: bool = True) -> Any:  # noqa: A002, FBT001, FBT002
        # A copy, as dropout makes one: what follows may write into it.
        return input.clone() if train else original(input, p, train)

    return dropout


def _keep_all_inplace(original: Any) -> Any:
    def dropout_(input: Any, p: float = 0.5, train: bool = True) -> Any:  # noqa: A002, FBT001, FBT002
        return input if train else original(input, p, train)

    return dropout_


def _with_mean_slope(original: Any) -> Any:
    def rrelu(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("training", None)
        return original(*args[:RRELU_TRAINING], **kwargs)

    return rrelu


def _without_rate(original: Any) -> Any:
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
        if len(args) > ATTENTION_RATE:
            args = (*args[:ATTENTION_RATE], 0.0, *args[ATTENTION_RATE + 1 :])
        elif "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        return original(*args, **kwargs)

    return scaled_dot_product_attention


def _without_rate_between_layers(original: Any) -> Any:
    def recurrent(*args: Any) -> Any:
        is_packed = not isinstance(args[3], bool)
        rate = RECURRENT_RATE + is_packed
        return original(*args[:rate], 0.0, *args[rate + 1 :])

    return recurrent
