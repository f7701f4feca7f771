"""Switches of a guard trial, the same on both sides: they take out what chance decides.

`pin_samples`, `drop_dropout`, `drop_autocast`, `keep_random_compile` and `pin_algorithms` each
return a function that switches back. All must be set right after torch was imported, in every
process that imports it (spawned loader workers too). The functions before them are torch's dropouts
with everything kept, for compilers as well. `round_once` shows what a script makes of one rounding.
"""

# ruff: noqa: A002, FBT001, FBT002, FBT003  the signatures are torch's

import contextlib
import functools
import hashlib
import random
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flatout.agent import patching
from flatout.agent.nested import leaves_of
from flatout.agent.patching import Order
from flatout.agent.session import Session
from flatout.agent.untouched import streams_kept

RECURRENT_RATE = 5
"""Place of the dropout rate in torch's recurrent functions: input, state, weights, whether there
are biases, number of layers, rate. With packed sequences the batch sizes come second."""
ATTENTION_RATE = 4
"""Place of the dropout rate in attention: query, key, value, mask, rate."""


def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Return the input; a copy, since what follows may write into the result."""
    return input.clone() if training and not inplace else input


def alpha_dropout(input: Any, p: float = 0.5, training: bool = False, inplace: bool = False) -> Any:
    """Return the input, as `dropout` does; off unless asked for."""
    return input.clone() if training and not inplace else input


def low_level_dropout(input: Any, p: float, train: bool) -> Any:
    """Stand for `torch.dropout` and its kin."""
    return input.clone() if train else input


def low_level_dropout_(input: Any, p: float, train: bool) -> Any:
    """Stand for the in-place twins of `torch.dropout` and its kin."""
    return input


def with_mean_slope(original: Any) -> Any:
    """Return `rrelu` with the mean of its random slopes."""

    def rrelu(
        input: Any,
        lower: float = 1 / 8,
        upper: float = 1 / 3,
        training: bool = False,
        inplace: bool = False,
    ) -> Any:
        return original(input, lower, upper, False, **({"inplace": True} if inplace else {}))

    return rrelu


def without_rate(original: Any) -> Any:
    """Return attention without its dropout."""

    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
        if len(args) > ATTENTION_RATE:
            args = (*args[:ATTENTION_RATE], 0.0, *args[ATTENTION_RATE + 1 :])
        elif "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        return original(*args, **kwargs)

    return scaled_dot_product_attention


def without_rate_between_layers(original: Any) -> Any:
    """Return a recurrent function without the dropout between its layers."""

    def recurrent(*args: Any) -> Any:
        is_packed = not isinstance(args[3], bool)
        rate = RECURRENT_RATE + is_packed
        return original(*args[:rate], 0.0, *args[rate + 1 :])

    return recurrent


DROPOUTS = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
"""Functions of `torch`, each with an in-place twin whose name ends in an underscore."""
NN_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d")
NN_ALPHA_DROPOUTS = ("alpha_dropout", "feature_alpha_dropout")
"""Functions of `torch.nn.functional`; the alpha ones are off by default. They are replaced
themselves, not what they call: a compiler then sees the same graph as in production but for the
dropout."""
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
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

    def pinned(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def fetch(fetcher: Any, indices: Any) -> Any:
            dataset, collate = fetcher.dataset, fetcher.collate_fn
            fetcher.dataset = _Pinned(dataset, seed)
            fetcher.collate_fn = _pinned_collate(collate, seed, indices)
            try:
                with streams_kept():
                    return original(fetcher, indices)
            finally:
                fetcher.dataset, fetcher.collate_fn = dataset, collate

        return fetch

    return patching.wrap(kind, "fetch", pinned, order=Order.GUARD).undo


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
    digest = hashlib.blake2b(f"{seed}:{_plain(key)!r}".encode(), digest_size=4).digest()
    number = int.from_bytes(digest, "little")
    torch.default_generator.manual_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


def _plain(key: Any) -> Any:
    """Return an index as something whose text is the same in every process."""
    if hasattr(key, "tolist"):
        return _plain(key.tolist())
    if isinstance(key, list | tuple):
        return tuple(_plain(item) for item in key)
    return key if isinstance(key, int | float | str | bytes) else type(key).__name__


def drop_dropout() -> Undo:
    """Switch every dropout of torch off by making its functions keep everything.

    The rates in the modules stay as they are: the guard compares them. Covered are `nn.Dropout` and
    its kin, the functional forms, `scaled_dot_product_attention`, multi-head attention, dropout
    between recurrent layers, and the random slopes of `rrelu`. Masks that a script draws on its own
    are not covered, and `torch.jit.script` cannot compile the replaced functions.
    """
    from torch.nn import functional

    patches = contextlib.ExitStack()

    def put(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        def placed(original: Any) -> Any:
            made = make(original)
            is_local = "<locals>" in made.__qualname__
            return patching.named(made, owner.__name__, name) if is_local else made

        patches.enter_context(patching.wrap(owner, name, placed, order=Order.GUARD))

    for name in NN_DROPOUTS:
        put(functional, name, lambda _: dropout)
    for name in NN_ALPHA_DROPOUTS:
        put(functional, name, lambda _: alpha_dropout)
    for name in DROPOUTS:
        put(torch, name, lambda _: low_level_dropout)
        put(torch, f"{name}_", lambda _: low_level_dropout_)
    put(functional, "scaled_dot_product_attention", without_rate)
    for owner in (functional, torch):
        put(owner, "rrelu", with_mean_slope)
        put(owner, "rrelu_", with_mean_slope)
    for name in RECURRENT:
        put(torch._VF, name, without_rate_between_layers)
    return patches.close


def drop_autocast() -> Undo:
    """Switch autocast off, for the calibration trial of a script that uses it.

    Its distance from full precision is then the natural scale of its tensors.
    """

    def disabled(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def build(autocast: Any, *args: Any, **kwargs: Any) -> None:
            original(autocast, *args, **kwargs)
            autocast._enabled = False

        return build

    kind = torch.amp.autocast_mode.autocast
    return patching.wrap(kind, "__init__", disabled, order=Order.GUARD).undo


def keep_random_compile() -> Undo:
    """Let compiled code draw its random numbers as eager code does.

    Inductor's own generator draws other masks from the same seed (a gradient 26 to 81 % away);
    with this switch compiled dropout matches like any other rounding.
    """
    from torch._inductor import config

    before = config.fallback_random
    config.fallback_random = True
    return functools.partial(setattr, config, "fallback_random", before)


def pin_algorithms() -> Undo:
    """Leave no algorithm to chance, whatever the script asks for, and round nothing to TF32.

    - With `torch.backends.cudnn.benchmark` a stopwatch chooses among algorithms that may be as far
      apart as TF32 and fp32 are: two runs of the same script take different ones.
    - Sums whose order is chance (cuDNN's weight gradients, atomic additions, attention's backward)
      moved the third loss of a ResNet-18 by 1.6e-3 on an H200, its sixteenth by 0.03.
    - Torch lets cuDNN round fp32 convolutions to TF32. Another memory format is then another
      rounding: channels_last moved the gradients of a ResNet-50 by 0.34 on an H200.

    Scripts read what they set. What a technique of flatout's switches on stays on: it is what is
    judged.
    """
    cudnn = torch.backends.cudnn
    pinned = {"benchmark": cudnn.benchmark, "deterministic": True, "allow_tf32": False}
    undos = contextlib.ExitStack()
    for name, value in pinned.items():
        undos.callback(_held(cudnn, name, value))
    if torch.version.cuda or torch.version.hip:  # a CPU's sums have one order
        undos.callback(_repeat_sums())
    return undos.close


def _held(owner: Any, name: str, value: Any) -> Undo:
    """Hold a switch of torch at a value, while it reads as scripts set it."""
    before = getattr(owner, name)
    undos = contextlib.ExitStack()
    undos.enter_context(
        patching.wrap(
            type(owner), name, lambda original: _Unheard(original, before), order=Order.GUARD
        )
    )
    original = vars(type(owner))[name].original
    original.__set__(owner, value)
    undos.callback(original.__set__, owner, before)
    return undos.close


def _repeat_sums() -> Undo:
    """Make torch's own operators repeat, and say nothing of it to scripts and compilers.

    Both would act otherwise: the setting is a part of the compiler's cache key.
    """
    said = {"mode": torch.are_deterministic_algorithms_enabled(), "warn_only": False}
    # Torch's own function tells the compiler as well.
    hold = torch._C._set_deterministic_algorithms

    def use(original: Any) -> Any:
        def use_deterministic_algorithms(mode: bool, *, warn_only: bool = False) -> None:
            said.update(mode=mode, warn_only=warn_only)
            original(mode, warn_only=warn_only)
            hold(True, warn_only=warn_only or not mode)

        return patching.named(use_deterministic_algorithms, "torch", "use_deterministic_algorithms")

    def asked(key: str) -> Any:
        return lambda original: functools.wraps(original)(lambda: said[key])

    undos = contextlib.ExitStack()
    for name, make in (
        ("use_deterministic_algorithms", use),
        ("are_deterministic_algorithms_enabled", asked("mode")),
        ("is_deterministic_algorithms_warn_only_enabled", asked("warn_only")),
    ):
        undos.enter_context(patching.wrap(torch, name, make, order=Order.GUARD))
    # What was not written reads as it ever did: filled with NaN, a masked buffer would be one.
    undos.callback(_held(torch.utils.deterministic, "fill_uninitialized_memory", False))
    warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation.*")
    warnings.filterwarnings("ignore", message=".*CUBLAS_WORKSPACE_CONFIG.*")
    hold(True, warn_only=True)
    undos.callback(lambda: hold(said["mode"], warn_only=said["warn_only"]))
    return undos.close


class _Unheard:
    """A switch that scripts set and read, and that switches nothing."""

    def __init__(self, original: Any, said: Any) -> None:
        self.original = original
        self.said = said
        """What it reads as; None for what it is."""

    def __get__(self, owner: Any, kind: Any) -> Any:
        return self.original.__get__(owner, kind) if self.said is None else self.said

    def __set__(self, owner: Any, value: Any) -> None:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("flatout."):
            self.said = None
            self.original.__set__(owner, value)
        else:
            self.said = value


def round_once(session: Session, *, to_bf16: bool = True) -> None:
    """Round the parameters of each root before its first call, and the arguments of every call.

    Everything after that is computed as the script says. Arguments that the training computes (a
    generator's images) are left alone.

    Some networks amplify whatever happens below: deep ones with BatchNorm, before they are trained.
    One rounding of their images to bf16 moves their gradients by a fifth, so that bf16 cannot be
    held to less. Where bf16 is further off than this trial explains, it is the script's arithmetic
    that loses digits: backward stability (Higham, Accuracy and Stability of Numerical Algorithms,
    2002, section 1.5).

    Without `to_bf16` nothing is rounded: each number moves by `NUDGE` of its last digits.
    """
    change = _round if to_bf16 else _nudge
    met: set[int] = set()

    def on_forward(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if id(module) not in met:
            met.add(id(module))
            for parameter in module.parameters():
                change(parameter)
        for leaf in leaves_of((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and not leaf.requires_grad:
                change(leaf)

    session.on("forward", on_forward)


def _round(tensor: torch.Tensor) -> None:
    if tensor.dtype in (torch.float32, torch.float64):
        # By way of `data`: autograd takes what it kept of an earlier call for unchanged, and a
        # second rounding does change nothing.
        tensor.data.copy_(tensor.data.to(torch.bfloat16))


NUDGE, NUDGE_CUDA = 16, 128
"""Last digits by which a number moves: another order of a sum of 300 terms moves it by 17, the
square root, as each rounding may go either way. An input and a weight stand for all of them. Some
of cuDNN's fp32 algorithms transform their operands (Winograd) and keep fewer digits: on an H200
channels_last moved the gradients of a ResNet-18 by 2.8e-3, some ten times as far as 16 would."""


def _nudge(tensor: torch.Tensor) -> None:
    """Move each number up or down by some last digits; the script's generators draw nothing."""
    if tensor.dtype not in (torch.float32, torch.float64):
        return
    places = torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape)
    # Knuth's multiplicative hash: without a pattern that a layout might share.
    goes_up = (places * 2654435761 >> 13) % 2 == 0
    step = (NUDGE_CUDA if tensor.is_cuda else NUDGE) * torch.finfo(tensor.dtype).eps
    tensor.data.mul_(torch.where(goes_up, 1 + step, 1 - step))
