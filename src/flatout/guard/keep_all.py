"""Torch's dropouts with everything kept, for compilers as well."""
# ruff: noqa: A002, FBT001, FBT002, FBT003  the signatures are torch's

from typing import Any

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
