"""From written-down calls to products, roles and changed calls; no script is run here."""

import pytest

from flatout.analysis.products import (
    attention_flops,
    counts_per_step,
    product_of,
    recast,
    resized,
    role_of,
)


def tensor(*shape, turned=False, dtype="float32"):
    stride = [1] * len(shape)
    for place in reversed(range(len(shape) - 1)):
        stride[place] = stride[place + 1] * shape[place + 1]
    if turned:
        stride[-2:] = [1, shape[-2]]
    return {"shape": list(shape), "stride": stride, "dtype": dtype}


def call(operator, *arguments, out, when="forward", tf32=False):
    return {
        "operator": f"aten::{operator}",
        "when": when,
        "arguments": list(arguments),
        "out": out,
        "tf32": tf32,
    }


LINEAR = call("mm", tensor(64, 32), tensor(32, 10, turned=True), out=tensor(64, 10))


def test_a_product_counts_operations_and_bytes():
    product = product_of(LINEAR, 3.0)

    assert (product.m, product.n, product.k, product.batch) == (64, 10, 32, 1)
    assert product.flops == 2 * 64 * 10 * 32
    assert product.bytes == 4 * (64 * 32 + 32 * 10 + 64 * 10)
    assert (product.layout, product.count) == ("NT", 3.0)


def test_a_bias_shown_for_each_row_is_read_once():
    bias = {"shape": [64, 10], "stride": [0, 1], "dtype": "float32"}
    arguments = (bias, *LINEAR["arguments"])

    product = product_of(call("addmm", *arguments, out=LINEAR["out"]), 1.0)

    assert product.bytes == 4 * (10 + 64 * 32 + 32 * 10 + 64 * 10)


def test_a_batched_product_has_its_batch():
    product = product_of(
        call("bmm", tensor(8, 4, 5), tensor(8, 5, 6), out=tensor(8, 4, 6)), count=1.0
    )

    assert (product.batch, product.m, product.n, product.k) == (8, 4, 6, 5)
    assert product.flops == 2 * 8 * 4 * 6 * 5


def test_a_product_in_fp8_has_one_byte_numbers():
    scale = {"shape": [], "stride": [], "dtype": "float32"}
    fp8 = {"dtype": "float8_e4m3fn"}
    left, right = tensor(64, 32) | fp8, tensor(32, 16, turned=True) | fp8
    out = tensor(64, 16, dtype="bfloat16")

    product = product_of(
        call("_scaled_mm", left, right, scale, scale, None, None, "torch.bfloat16", out=out), 1.0
    )

    assert (product.m, product.n, product.k, product.dtype) == (64, 16, 32, "float8_e4m3fn")
    assert product.flops == 2 * 64 * 16 * 32
    assert product.bytes == 64 * 32 + 32 * 16 + 2 * 4 + 2 * 64 * 16


ENDS = {"shape": [4], "stride": [1], "dtype": "int32"}


@pytest.mark.parametrize(
    ("left", "right", "out", "sizes", "role"),
    [
        (tensor(48, 32), tensor(4, 32, 16), tensor(48, 16), (12, 16, 32), "dgrad"),
        (tensor(32, 48, turned=True), tensor(48, 16), tensor(4, 32, 16), (32, 16, 12), "wgrad"),
        (tensor(4, 16, 32), tensor(32, 48), tensor(16, 48), (16, 12, 32), "dgrad"),
    ],
)
def test_products_in_groups_are_a_batch_of_the_average_group(left, right, out, sizes, role):
    given = call("_grouped_mm", left, right, ENDS, out=out, when="backward")

    product = product_of(given, 1.0)

    assert (product.m, product.n, product.k) == sizes
    assert (product.batch, product.role) == (4, role)
    assert product.flops == 2 * 48 * 16 * 32
    assert product_of({**given, "when": "forward"}, 1.0).role == "forward"


def test_groups_of_one_size_are_a_batched_product():
    given = call("_grouped_mm", tensor(4, 8, 32), tensor(4, 32, 16), out=tensor(4, 8, 16))

    assert product_of(given, 1.0).flops == 2 * 4 * 8 * 16 * 32


def test_tf32_is_its_own_arithmetic():
    assert product_of({**LINEAR, "tf32": True}, 1.0).dtype == "tf32"


def test_a_convolution_is_pixels_by_channels():
    arguments = (tensor(2, 3, 8, 8), tensor(16, 3, 3, 3), None, [1, 1], [1, 1], [1, 1])
    product = product_of(
        call("convolution", *arguments, *(False, [0, 0], 1), out=tensor(2, 16, 8, 8)), 1.0
    )

    assert (product.m, product.n, product.k) == (2 * 64, 16, 27)
    assert product.flops == 2 * 128 * 16 * 27
    assert product.layout == "channels first"


@pytest.mark.parametrize(("mask", "products"), [([True, True], 2), ([False, True], 1)])
def test_a_convolution_s_backward_counts_what_it_computes(mask, products):
    product = product_of(
        call(
            "convolution_backward",
            *(tensor(2, 16, 8, 8), tensor(2, 3, 8, 8), tensor(16, 3, 3, 3), None),
            *([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [*mask, False]),
            out=[tensor(2, 3, 8, 8), tensor(16, 3, 3, 3)],
            when="backward",
        ),
        1.0,
    )

    assert product.flops == products * 2 * 128 * 16 * 27
    assert role_of(product, []) == "both"


@pytest.mark.parametrize(
    ("left", "right", "out", "role"),
    [
        (tensor(64, 10), tensor(10, 32), tensor(64, 32), "dgrad"),
        (tensor(10, 64, turned=True), tensor(64, 32), tensor(10, 32), "wgrad"),
        (tensor(32, 64, turned=True), tensor(64, 10), tensor(32, 10), "wgrad"),
    ],
)
def test_roles_follow_from_the_forward_products(left, right, out, role):
    product = product_of(call("mm", left, right, out=out, when="backward"), 1.0)

    assert role_of(product, [product_of(LINEAR, 1.0)]) == role


@pytest.mark.parametrize(("turned", "role"), [(True, "wgrad"), (False, "dgrad")])
def test_where_all_sizes_are_equal_the_layout_tells(turned, role):
    square = tensor(32, 32)
    forward = product_of(call("mm", square, square, out=square), 1.0)
    product = product_of(
        call("mm", tensor(32, 32, turned=turned), square, out=square, when="backward"), 1.0
    )

    assert role_of(product, [forward]) == role


def test_both_gradients_of_a_batched_product_are_of_inputs():
    forward = call("bmm", tensor(8, 4, 5), tensor(8, 5, 6), out=tensor(8, 4, 6))
    turned = call(
        "bmm", tensor(8, 5, 4, turned=True), tensor(8, 4, 6), out=tensor(8, 5, 6), when="backward"
    )

    assert role_of(product_of(turned, 1.0), [product_of(forward, 1.0)]) == "dgrad"


def test_what_is_computed_again_keeps_its_name():
    product = product_of({**LINEAR, "when": "again"}, 1.0)

    assert role_of(product, [product]) == "again"


def test_a_size_is_changed_wherever_it_stands():
    changed = resized(LINEAR, {10: 16})

    assert changed["arguments"][1] == tensor(32, 16, turned=True)
    assert changed["out"] == tensor(64, 16)
    assert product_of(changed, 1.0).n == 16


def test_a_bias_stays_one_row():
    bias = {"shape": [64, 10], "stride": [0, 1], "dtype": "float32"}
    changed = resized(
        call("addmm", bias, *LINEAR["arguments"], out=LINEAR["out"]), {10: 16, 64: 128}
    )

    assert changed["arguments"][0] == {"shape": [128, 16], "stride": [0, 1], "dtype": "float32"}


def test_the_batch_of_a_batched_product_stays():
    changed = resized(call("bmm", tensor(8, 8, 5), tensor(8, 5, 6), out=tensor(8, 8, 6)), {8: 16})

    assert changed["arguments"][0] == tensor(8, 16, 5)


def test_without_that_size_nothing_changes():
    assert resized(LINEAR, {11: 16}) is None


def test_another_arithmetic_reaches_every_tensor():
    changed = recast(LINEAR, "bfloat16")

    assert {t["dtype"] for t in (*changed["arguments"], changed["out"])} == {"bfloat16"}
    assert recast(LINEAR, "tf32")["arguments"] == LINEAR["arguments"]
    assert recast(LINEAR, "tf32")["tf32"]


def test_counts_are_those_of_a_step_of_several_segments():
    segments = [{"who": who, "counts": {"0": 1}, "attention_flops": 5.0} for who in (0, 1) * 4]

    assert counts_per_step(segments) == {"0": 2.0}
    assert attention_flops(segments) == 10.0


def test_where_every_step_has_sizes_of_its_own_the_calls_of_one_step_count():
    segments = [{"who": 0, "counts": {"0": 1, str(n): 3, str(n + 10): 3}} for n in range(1, 8)]

    assert counts_per_step(segments) == {"0": 1.0, "4": 3.0, "14": 3.0}
