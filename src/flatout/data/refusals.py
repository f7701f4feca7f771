"""Samples that cannot be packed, and what is done about them."""

from dataclasses import dataclass

RAISE = "raise"


class BadSample(ValueError):  # noqa: N818  what it is, like StopIteration
    """One sample cannot be packed; the text says why. The policy decides what follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """One sample that was left out."""

    name: str
    reason: str


def refuse(name: str, reason: str, *, on_bad: str, skipped: list[Skipped]) -> None:
    """Note a sample that is left out, or stop, as the policy says.

    Raises:
        BadSample: under the policy `raise`.
    """
    if on_bad == RAISE:
        raise BadSample(f"{name}: {reason}")
    skipped.append(Skipped(name=name, reason=reason))
