from dataclasses import replace

import pytest

from flatout.analysis.product_advice import advised, plan
from flatout.analysis.products import Seen, product_of
from tests.analysis.test_products import call, tensor
from tests.reporting.made_up_roofline import CPU

ONLY_FP32 = replace(CPU, gemm_flops_per_s={"float32": 200e9})


def seen(m, n, k, roof_share=0.5):
    """Return a product that runs at a part of its roof."""
    made = call("mm", tensor(m, k), tensor(k, n), out=tensor(m, n))
    product = product_of(made, 1.0)
    return Seen(call=made, product=replace(product, ms=product.least_ms(CPU) / roof_share))


def of_kind(kind, changes):
    return [change for change in changes if change.advice.kind == kind]


def test_an_odd_vocabulary_is_padded_in_every_product_that_has_it():
    rows = [seen(512, 5003, 256, 0.2), seen(512, 256, 5003, 0.2), seen(512, 256, 256, 0.8)]

    (pad,) = of_kind("pad", plan(rows, ONLY_FP32))

    assert pad.advice.what == "pad the size 5003 to 5056"
    assert set(pad.calls) == {0, 1}
    # As near to the roof as the even product: four times as fast, less the padding.
    assert pad.advice.predicted_ratio == pytest.approx(4 * 5003 / 5056, rel=0.02)


def test_padding_that_is_mostly_zeros_is_not_proposed():
    assert of_kind("pad", plan([seen(512, 10, 256)], ONLY_FP32)) == []


def test_even_sizes_need_no_padding():
    assert of_kind("pad", plan([seen(512, 1024, 256)], ONLY_FP32)) == []


def test_fp32_is_shortened_where_the_device_is_much_faster():
    (precision,) = of_kind("precision", plan([seen(512, 1024, 1024)], CPU))

    assert precision.advice.what == "products of float32 in bfloat16"
    assert precision.advice.predicted_ratio == pytest.approx(4.0)


def test_arithmetic_that_is_hardly_faster_is_not_proposed():
    slow = replace(CPU, gemm_flops_per_s={"float32": 200e9, "bfloat16": 210e9})

    assert of_kind("precision", plan([seen(512, 1024, 1024)], slow)) == []


def test_few_rows_are_doubled_where_memory_decides():
    (batch,) = of_kind("batch", plan([seen(4, 1024, 1024)], ONLY_FP32))

    assert batch.advice.what == "8 rows instead of 4"
    assert batch.work == 2.0
    assert batch.advice.predicted_ratio == pytest.approx(2.0, rel=0.02)


def test_many_rows_are_enough():
    assert of_kind("batch", plan([seen(512, 1024, 1024)], ONLY_FP32)) == []


def test_a_product_without_weight_in_the_step_gets_no_advice():
    rows = [seen(2048, 2048, 2048), seen(16, 101, 16)]

    assert of_kind("pad", plan(rows, ONLY_FP32)) == []


def test_without_times_there_is_no_advice():
    row = seen(512, 5003, 256)

    assert plan([replace(row, product=replace(row.product, ms=None))], CPU) == ()


def test_the_gain_is_the_measured_one_for_the_same_work():
    rows = [seen(4, 1024, 1024)]
    (change,) = of_kind("batch", plan(rows, ONLY_FP32))

    advice = advised(change, rows, {0: (10.0, 12.0)})

    assert advice.measured_ratio == pytest.approx(2 * 10 / 12)
    assert advice.saved_ms == pytest.approx(rows[0].product.ms * (1 - 12 / 20))


def test_what_could_not_be_timed_is_not_measured():
    rows = [seen(4, 1024, 1024)]
    (change,) = of_kind("batch", plan(rows, ONLY_FP32))

    assert advised(change, rows, {}).measured_ratio is None
