"""Every way in which torch and the libraries below it say that memory ran out."""

import pytest

from flatout.records.errors import is_out_of_memory


@pytest.mark.parametrize(
    "text",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.",
        "torch.cuda.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB.",
        "torch.AcceleratorError: CUDA error: out of memory",
        "RuntimeError: CUDA driver error: out of memory",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "RuntimeError: Triton Error [CUDA]: out of memory",
        "ncclUnhandledCudaError: Cuda failure 2 'out of memory'",
        "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ...",
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.45 GiB",
    ],
)
def test_it_is_recognised(text):
    assert is_out_of_memory(text)


@pytest.mark.parametrize(
    "text",
    [
        "torch.AcceleratorError: CUDA error: device-side assert triggered",
        "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`",
        "RuntimeError: Found no NVIDIA driver on your system.",
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    ],
)
def test_other_failures_of_a_device_are_not_taken_for_it(text):
    assert not is_out_of_memory(text)
