import pytest

from tests.rules.source.scenario import codes_in

LOOP = """import torch
optimizer = torch.optim.AdamW(model.parameters())
for {target} in {loader}:
    {body}
    loss = model(**encoded).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def loop(body, target="texts", loader="loader"):
    return LOOP.format(body=body, target=target, loader=loader)


@pytest.mark.parametrize(
    ("body", "target"),
    [
        ('encoded = tokenizer(texts, padding=True, return_tensors="pt")', "texts"),
        ("encoded = self.tokenizer(list(texts))", "texts, labels"),
        ("encoded = tokenizer.batch_encode_plus(texts)", "texts"),
        ("encoded = tokenizer(batch['text'])", "step, batch"),
        ("encoded = clip.tokenize(batch[0])", "batch"),
        ("encoded = tokenizer(text=batch.texts)", "batch"),
        ("encoded = stack([tokenizer.encode(text) for text in texts])", "texts"),
    ],
)
def test_texts_that_are_tokenised_in_each_step_are_found(body, target):
    assert codes_in(loop(body, target)) == {"DL20": [4]}


@pytest.mark.parametrize("taken", ["texts, labels = batch", "texts = batch['text']"])
def test_a_batch_may_be_taken_apart_before(taken):
    assert codes_in(loop(f"{taken}\n    encoded = tokenizer(texts)", "batch")) == {"DL20": [5]}


def test_a_batch_may_be_drawn_in_the_loop():
    text = loop("batch = next(batches)\n    encoded = tokenizer(batch)", "step", "range(9)")

    assert codes_in(text) == {"DL20": [5]}


@pytest.mark.parametrize(
    "body",
    [
        "encoded = tokenizer(texts) if step % 100 == 0 else None",
        "encoded = tokenizer(model.generate(ids))",
        "answers = model.generate(texts)\n    encoded = tokenizer(answers)",
        "encoded = texts; tokenizer.batch_decode(texts)",
        "encoded = tokenizer.pad(texts)",
        "encoded = encoder(texts)",
        "encoded = texts\n    def again(): return tokenizer(texts)",
    ],
)
def test_other_calls_are_left_alone(body):
    assert codes_in(loop(body)) == {}


def test_what_workers_do_is_left_alone():
    made = "def collate(rows):\n    return tokenizer([row[0] for row in rows])\n"

    assert codes_in(f"{made}{loop('encoded = texts')}") == {}


def test_an_evaluation_is_left_alone():
    text = "for texts in loader:\n    print(model(**tokenizer(texts)).loss)\n"

    assert codes_in(f"import torch\n{text}") == {}
