"""Fast operators, each alongside its plain reference."""

from flatout.kernels.gemm import gemm

__all__ = ["gemm"]
