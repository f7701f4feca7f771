"""GPU performance monitoring (GPM), on Hopper and later: multiprocessors and tensor cores at work.

GPM gives means between two of its own samples, without a profiler's replay and without slowing the
kernels down. Not measured on a GPU yet.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Any

SM_ACTIVE, TENSOR_ACTIVE = 2, 5
"""NVML_GPM_METRIC_SM_UTIL and NVML_GPM_METRIC_ANY_TENSOR_UTIL, in percent, of nvml.h."""
METRICS = {SM_ACTIVE: "sm_active_share", TENSOR_ACTIVE: "tensor_active_share"}
TOO_OLD = "this GPU has no GPM counters; they came with Hopper"


class Gpm:
    """The activity of one GPU, or of an instance of it, between two calls of `read`.

    Args:
        nvml: The driver's library.
        handle: The whole GPU.
        take: Reads the counters into a sample: those of the GPU, or of an instance (MIG) alone.
    """

    def __init__(self, nvml: Any, handle: Any, take: Callable[[Any], object]) -> None:
        self.nvml = nvml
        self.handle = handle
        self.take = take
        self.samples: list[Any] = []
        self.is_primed = False
        self.trouble = self._start()

    def read(self, values: dict[str, float], missing: dict[str, str]) -> None:
        """Add the shares since the last call, or why there are none."""
        reason = self.trouble
        if not reason:
            try:
                self._advance(values, missing)
            except (self.nvml.NVMLError, AttributeError) as error:
                self.is_primed = False
                reason = str(error)
        if reason:
            missing.update(dict.fromkeys(METRICS.values(), reason))

    def close(self) -> None:
        """Free the driver's samples."""
        for sample in self.samples:
            with contextlib.suppress(self.nvml.NVMLError):
                self.nvml.nvmlGpmSampleFree(sample)
        self.samples = []

    def _start(self) -> str:
        """Ask whether there is GPM and allocate; return why not."""
        nvml = self.nvml
        try:
            if not nvml.nvmlGpmQueryDeviceSupport(self.handle).isSupportedDevice:
                return TOO_OLD
            self.samples = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
        except (nvml.NVMLError, AttributeError) as error:
            return str(error) or TOO_OLD
        return ""

    def _advance(self, values: dict[str, float], missing: dict[str, str]) -> None:
        self.take(self.samples[1])
        if self.is_primed:
            self._add(values, missing)
        self.samples.reverse()
        self.is_primed = True

    def _add(self, values: dict[str, float], missing: dict[str, str]) -> None:
        nvml = self.nvml
        question = nvml.c_nvmlGpmMetricsGet_t()
        question.version = nvml.NVML_GPM_METRICS_GET_VERSION
        question.numMetrics = len(METRICS)
        question.sample1, question.sample2 = self.samples
        for place, number in enumerate(METRICS):
            question.metrics[place].metricId = number
        nvml.nvmlGpmMetricsGet(question)
        for place, name in enumerate(METRICS.values()):
            answer = question.metrics[place]
            if answer.nvmlReturn != nvml.NVML_SUCCESS:
                missing[name] = f"GPM answered with error {answer.nvmlReturn}"
            elif not math.isfinite(answer.value):
                missing[name] = "GPM answered with no number: two samples too close together"
            else:
                values[name] = answer.value / 100
