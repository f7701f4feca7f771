"""Fast operators, each beside its plain reference."""

from flatout.kernels.gemm import gemm

__all__ = ["gemm"]
