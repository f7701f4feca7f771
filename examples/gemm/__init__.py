"""A matrix product with what follows it, in one kernel: from its call down to its tiles."""

from examples.gemm.product import gemm

__all__ = ["gemm"]
