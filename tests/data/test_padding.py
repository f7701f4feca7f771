import pytest
import torch

from flatout.data.padding import first_fit, is_predicted_inside, packed, trimmed


def batch(lengths, width=12, *, left=False, counts=False):
    mask = torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        columns = slice(width - length, width) if left else slice(0, length)
        mask[row, columns] = 1
    tokens = torch.arange(mask.numel()).reshape(mask.shape) * mask
    labels = tokens if counts else tokens.masked_fill(mask == 0, -100)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels, "y": torch.ones(2)}


@pytest.mark.parametrize("left", [False, True])
def test_columns_that_all_samples_pad_are_cut(left):
    whole = batch([3, 5], left=left)

    whole["labels"][:, 7] = -100  # on the left the place of the longest row's first token

    short = trimmed(whole)

    assert short["input_ids"].shape == (2, 5)
    kept = whole["attention_mask"].bool()
    assert torch.equal(short["input_ids"][short["attention_mask"].bool()], whole["input_ids"][kept])
    assert short["labels"].shape == (2, 5)
    assert short["y"] is whole["y"]


def test_the_place_that_predicts_the_first_token_behind_padding_stays():
    whole = batch([3, 5], left=True)

    short = trimmed(whole)

    assert short["attention_mask"].tolist() == whole["attention_mask"][:, 6:].tolist()
    assert torch.equal(short["labels"], whole["labels"][:, 6:])


@pytest.mark.parametrize(("multiple", "width"), [(8, 8), (4, 8), (16, 12), (1, 5)])
def test_the_length_is_rounded_up(multiple, width):
    assert trimmed(batch([3, 5]), multiple_of=multiple)["input_ids"].shape[1] == width


def test_the_batch_that_was_given_is_left_alone():
    whole = batch([3, 5])

    trimmed(whole)

    assert whole["input_ids"].shape == (2, 12)


def beside(whole, other, prefix):
    """Return a batch with the tokens of another one under names of their own."""
    names = ("input_ids", "attention_mask")
    return whole | {prefix + name: other[name] for name in names}


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("prefix", ["doc_", "decoder_"])
def test_what_the_mask_of_a_second_text_keeps_stays(prefix, left):
    other = batch([7, 9], left=left)

    short = trimmed(beside(batch([3, 5], left=left), other, prefix))

    for name in ("input_ids", prefix + "input_ids"):
        assert short[name].shape == (2, 9)
    kept = short[prefix + "attention_mask"].bool()
    all_tokens = other["input_ids"][other["attention_mask"].bool()]
    assert torch.equal(short[prefix + "input_ids"][kept], all_tokens)


def test_what_has_one_filler_in_the_padding_is_cut_along():
    whole = batch([3, 5])
    weights = torch.full((2, 12), 0.5)
    weights[0, 1] = 2.0
    positions = torch.arange(12).expand(2, 12)

    short = trimmed(whole | {"weights": weights, "position_ids": positions})

    assert torch.equal(short["weights"], weights[:, :5])
    assert torch.equal(short["position_ids"], positions[:, :5])


@pytest.mark.parametrize(
    "whole",
    [
        batch([3, 12]),
        batch([0, 0]),
        batch([3, 5], counts=True),
        batch([3, 5]) | {"doc_input_ids": batch([7, 9])["input_ids"]},
        batch([3, 5]) | {"features": torch.arange(48.0).reshape(2, 12, 2)},
        beside(batch([3, 5]), batch([3, 12]), "doc_"),
        {"x": torch.zeros(2, 3)},
        [torch.zeros(2, 3)],
    ],
    ids=[
        "full",
        "empty",
        "labels count padding",
        "a second text without a mask",
        "features of something else",
        "a second text that is full",
        "no mask",
        "no mapping",
    ],
)
def test_batches_that_must_stay_as_they_are(whole):
    assert trimmed(whole) is whole


@pytest.mark.parametrize(
    ("whole", "inside"),
    [
        (batch([3, 12]), True),
        (batch([3, 5], counts=True), False),
        (batch([3, 12], left=True), False),
        (batch([12, 12], left=True), True),
    ],
    ids=["padding ignored", "labels count padding", "padding predicts", "no padding"],
)
def test_labels_are_inside_where_their_own_sample_predicts_them(whole, inside):
    assert is_predicted_inside(whole["labels"], whole["attention_mask"]) is inside


def test_samples_are_packed_whole_with_positions_of_their_own():
    whole = batch([3, 8, 4, 5])

    made = packed(whole)

    assert made["input_ids"].shape == (2, 12)
    rows = made["input_ids"].tolist()
    for sample, length in enumerate([3, 8, 4, 5]):
        tokens = whole["input_ids"][sample, :length].tolist()
        (row,) = (r for r in range(2) if is_inside(tokens, rows[r]))
        start = rows[row].index(tokens[1]) - 1
        assert made["position_ids"][row, start : start + length].tolist() == list(range(length))
        assert made["labels"][row, start] == -100
        assert made["labels"][row, start + 1 : start + length].tolist() == tokens[1:]
    assert (made["labels"] != -100).sum() == 3 + 8 + 4 + 5 - 4


def is_inside(part, whole):
    return any(whole[i : i + len(part)] == part for i in range(len(whole)))


def test_nothing_is_packed_where_no_row_is_won():
    assert packed(batch([9, 9, 9])) is None


def test_the_longest_samples_are_placed_first_and_none_overlaps():
    places = first_fit([5, 1, 7, 3, 2], 8)

    taken = [(row, start + i) for (row, start), n in zip(places, [5, 1, 7, 3, 2], strict=True)
             for i in range(n)]  # fmt: skip
    assert len(taken) == len(set(taken)) == 18
    assert max(row for row, _ in taken) == 2
    assert max(column for _, column in taken) < 8
