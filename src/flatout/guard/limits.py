"""The limits of the guard, one column for each numeric promise.

Source of the numbers: the guard study of 2026-11-20 on torch 2.13 CPU (six models, 84 + 108 honest
runs and 166 + 204 faulty ones, calibration and held-out sets apart), written down in
`docs/guard-limits.md`. On an H200 every fault of the tests was rejected by them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from flatout.records.technique import Numerics

BF16_ROUNDING = 2.0**-9
"""Half the spacing of bf16 at 1: no honest precision technique was judged below this scale."""
TF32_SHARE = 0.25
"""Of bf16's limits. TF32 keeps ten bits of the mantissa where bf16 keeps seven: an eighth of the
rounding, and twice that where bits are cut off instead of rounded. Derived."""
REPEAT_FACTOR = 3.0
"""A limit is never below this multiple of what the baseline shows against itself."""
LIVE_SHARE = 1e-3
"""A tensor is live if its gradient's norm exceeds this share of an average tensor's. Below are true
zeros (biases before a BatchNorm, key biases of attention), whose recorded values are rounding."""
DEAD_SHARE = 1e-2
"""Largest share of the whole gradient that a dead tensor may have: bf16 showed 2e-4, a BatchNorm in
eval mode 0.11."""
UPDATE_LIMIT = 3e-4
"""Largest difference between an update and its shadow, over the shadow's norm: honest optimizers
show 2.9e-8 (fused), the mildest faulty one 1.2e-3 (no weight decay)."""
ROUNDINGS = 2
"""Roundings of the stored parameter that an update may differ by for free."""
AUTOCAST_CHANGED_NOTHING = 1e-6
"""Median difference of the calibration below which autocast had nothing to do: the least honest
bf16 was 2.4e-3, the largest fp32 rounding 3e-5 on single tensors and 1e-6 in the median."""
TINY_LOSS = 0.05
"""Losses below this share of the largest are compared on its scale: a relative difference of
almost nothing says nothing. A ResNet-18 that learns its few images by heart falls from 2.4 to
0.003 in twelve steps; another algorithm of cuDNN made 0.02 of that."""
MAX_REPEAT = {"gradient": BF16_ROUNDING, "loss": 1e-3, "later loss": 0.5, "buffers": 0.02}
"""A script that differs from itself by more than bf16 rounding would does not repeat: three times
that difference would let everything through. Later losses are what training made of a rounding: one
thread instead of two moved a ResNet's by 0.14 at step 17. On a GPU, where two equal runs may round
differently, no more can be asked of them; the 0.5 is ours, above that and below another training.
"""
GRADIENT_CEILING = 0.3
"""No tensor's gradient may differ by more under `precision`, whatever the calibration shows: honest
bf16 had 0.08 on its worst tensor (a ResNet). Ours, set between that and the 0.42 of a script that
loses its digits by cancellation."""
SECOND_CEILING = 0.6
"""The same for all tensors of the second step together, where parameters differ already: honest
bf16 had 0.04 in the study, 0.22 on a tiny generator, 0.29 on a ResNet with a high rate."""
ROUNDED_FACTOR = 3.0
"""bf16 may be so many times as far off as one rounding of inputs and weights. On single tensors up
to 1.75 times (ResNet-18) and 1.45 times (ResNet-50) were measured before training, the bias of the
last layer apart, which stays below the ceiling as it is."""
TURNED_FACTOR = 1.5
"""The slope of a tensor may be off so many times as far as one rounding moves that tensor: up to
1.08 times was seen (ResNet-18 and ResNet-50 under bf16 on an H200, 223 tensors)."""
NUDGED_FACTOR = 3.0
"""A rounding technique may be so many times as far off as the script is when the last digits of its
inputs and weights move. channels_last was up to 1.0 times on five CNNs of 4 to 15 layers with
BatchNorm and ReLU, on the tensor that each moved most."""
SIZE_LIMIT = 0.3
"""Where ceilings are lifted: how much larger or smaller the whole gradient may be. Chaos turns it
round and leaves its size; a gradient that was not set to zero is 1.4 times as large."""
EARLY_LOSSES = 3
"""Losses that a rounding technique must match closely. On a ResNet with SGD, one thread instead of
two was 1e-4 off at step 4, 4e-3 at step 5 and 0.14 at step 17, where bf16 was 0.15 off."""
SHARE_CAP = 1e6
"""Stands for any share above it, and for a limit of zero that was broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The larger of a floor and a multiple of what the calibration trial showed, up to a ceiling.

    The ceiling is for scripts that lose precision by cancellation: there the calibration itself
    trains something else, and a multiple of it would let anything through. It is lifted where the
    script makes as much of one rounding of its inputs and weights: no arithmetic could do better.
    """

    floor: float
    factor: float
    ceiling: float = math.inf

    def of(self, scale: float, noise: float, own: float = 0.0) -> float:
        """Return the limit for a calibration's value, the repeat's, and that of one rounding.

        >>> Limit(floor=1e-5, factor=0.01).of(0.02, noise=0.0)
        0.0002
        >>> limit = Limit(floor=0.0, factor=3.0, ceiling=0.3)
        >>> limit.of(0.5, noise=0.0), limit.of(0.5, noise=0.0, own=0.2)
        (0.3, 0.6000000000000001)
        """
        ceiling = max(self.ceiling, ROUNDED_FACTOR * own)
        calibrated = min(ceiling, max(self.floor, self.factor * scale))
        return max(calibrated, REPEAT_FACTOR * noise)

    def scaled(self, share: float) -> "Limit":
        """Return this share of the limit."""
        floor, factor = share * self.floor, share * self.factor
        return Limit(floor=floor, factor=factor, ceiling=share * self.ceiling)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromiseLimits:
    """What one promise allows."""

    gradient: Limit
    """Each live tensor at the first step, relative: G1 before clipping, G2 at the step."""
    slope: Limit | None = None
    """Each live tensor's gradient regressed on the baseline's, minus one: G3."""
    buffers: Limit
    """Each buffer after the first step, relative: G5."""
    second: Limit
    """Gradient of the second step, all tensors together, relative: G6."""
    loss: Limit
    """Largest relative difference over the steps: G7."""


EQUAL_BITS = Limit(floor=0.0, factor=0.0)
LAST_DIGITS = Limit(floor=1e-6, factor=0.0)
COLUMNS: Mapping[Numerics, PromiseLimits] = {
    Numerics.EXACT: PromiseLimits(
        gradient=EQUAL_BITS, buffers=EQUAL_BITS, second=EQUAL_BITS, loss=EQUAL_BITS
    ),
    Numerics.ROUNDING: PromiseLimits(
        gradient=Limit(floor=1e-5, factor=0.01),
        buffers=Limit(floor=1e-4, factor=0.01),
        second=Limit(floor=1e-5, factor=0.02),
        loss=Limit(floor=1e-4, factor=0.1),
    ),
    Numerics.PRECISION: PromiseLimits(
        gradient=Limit(floor=3 * BF16_ROUNDING, factor=3.0, ceiling=GRADIENT_CEILING),
        slope=Limit(floor=0.03, factor=3.0, ceiling=GRADIENT_CEILING),
        buffers=Limit(floor=0.02, factor=3.0, ceiling=GRADIENT_CEILING),
        second=Limit(floor=3 * BF16_ROUNDING, factor=3.0, ceiling=SECOND_CEILING),
        loss=Limit(floor=1e-3, factor=4.0),
    ),
}
UNSTEADY_COLUMN = PromiseLimits(
    gradient=LAST_DIGITS,
    buffers=LAST_DIGITS,
    second=LAST_DIGITS,
    loss=Limit(floor=1e-5, factor=0.0),
)
"""For exact techniques where the script repeats up to rounding only: one repeat may by chance hit
or miss a number by its last digits, of which fp32 has 1.2e-7. The floors are ours, some of those.
"""
TF32_COLUMN = PromiseLimits(
    **{
        each.name: getattr(COLUMNS[Numerics.PRECISION], each.name).scaled(TF32_SHARE)
        for each in fields(PromiseLimits)
    }
)
"""For rounding techniques where the device rounds to TF32 anyway: another algorithm is then as far
off as TF32 is, and says nothing about the technique."""
