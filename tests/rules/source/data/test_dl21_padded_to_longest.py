import pytest

from tests.rules.source.scenario import codes_in

CODE = "import transformers\nfrom torch.utils.data import DataLoader\nloader = DataLoader(d)\n"


@pytest.mark.parametrize("name", ["tokenizer", "self.tokenizer", "tok.tokenize"])
def test_padding_to_the_full_length_is_found(name):
    assert codes_in(f'{CODE}{name}(text, padding="max_length")\n') == {"DL21": [4]}


@pytest.mark.parametrize(
    "call", ["tokenizer(text, padding=True)", "tokenizer(text)", 'layer(x, padding="max_length")']
)
def test_other_padding_is_left_alone(call):
    assert codes_in(f"{CODE}{call}\n") == {}


def test_a_file_that_does_not_train_is_left_alone():
    assert codes_in('import transformers\ntokenizer(text, padding="max_length")\n') == {}


def test_a_tpu_wants_one_length():
    text = f'{CODE}if kind == DistributedType.XLA:\n    tokenizer(text, padding="max_length")\n'

    assert codes_in(text) == {}


def test_a_text_that_is_the_condition_of_another_model_keeps_its_length():
    made = 'tokenizer(text, padding="max_length")\nencoded = text_encoder(ids)\n'

    assert codes_in(f"{CODE}{made}") == {}
