"""A script that asks for a CUDA device where torch finds none: every way in which that is said."""

import pytest

from flatout.analysis.loader_faults import find_missing_device


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an ...",
        "RuntimeError: No CUDA GPUs are available",
        "AssertionError: CUDA is not available but cuda was specified.",
        "AssertionError: Torch not compiled with CUDA enabled",
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please",
        "torch.AcceleratorError: CUDA error: no CUDA-capable device is detected",
    ],
)
def test_it_is_told_with_the_words_of_the_driver(text):
    said = find_missing_device(f"Traceback:\n  File train.py\n{text}\n")

    assert "flatout doctor" in said
    assert said.partition("(")[2].partition(")")[0].split("(")[0].strip() in text


def test_other_crashes_are_left_to_their_own_words():
    assert find_missing_device("RuntimeError: CUDA error: device-side assert triggered") is None


def test_a_script_that_says_it_goes_on_without_a_device_asks_for_none():
    said = "WARNING: CUDA is not available, training on the CPU\nValueError: no data"

    assert find_missing_device(said) is None
