import inspect
import os
import random
import textwrap

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from flatout.data import caching
from flatout.data.caching import store_of
from flatout.records.errors import NotApplicable
from flatout.techniques.data import ram_cache
from flatout.techniques.data.loader_workers import LoaderWorkers
from flatout.techniques.data.pretokenized import Pretokenized
from tests.data.texts import Texts, Tokenizer
from tests.techniques.data.samples import Numbers, Stream
from tests.techniques.facts import loader, machine, profile

PROMISE = "asked of the guard in tests/data/test_techniques_in_trials.py"


class Masked(Texts):
    """Tokens that are masked at random, as for a masked language model."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        sample["input_ids"][random.randrange(3)] = 0
        return sample


class Noted(Dataset):
    """Real text through a real tokenizer; who tokenised what is written down."""

    def __init__(self, tokenizer, texts, notes):
        self.tokenizer, self.texts, self.notes = tokenizer, texts, notes

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        with self.notes.open("a") as file:
            file.write(f"{os.getpid()} {index}\n")
        return torch.tensor(self.tokenizer.encode(self.texts[index]).ids[:8])


PROCESSES = 3


def noted(dataset):
    """Return the process and the sample of each call of the tokenizer since the last time asked."""
    lines = dataset.notes.read_text().splitlines() if dataset.notes.exists() else []
    dataset.notes.unlink(missing_ok=True)
    return [tuple(map(int, line.split())) for line in lines]


@pytest.fixture
def real_text(tmp_path):
    """Paragraphs of the standard library, and a tokenizer that was trained on them."""
    tokenizers = pytest.importorskip("tokenizers")
    paragraphs = inspect.getsource(textwrap).split("\n\n")
    texts = [text for text in paragraphs if len(text) > 40]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["?"])
    tokenizer.train_from_iterator(texts, trainer)
    return Noted(tokenizer, texts, tmp_path / "notes")


@pytest.mark.parametrize("workers", [0, 2])
def test_several_processes_tokenise_each_text_once_and_nobody_does_later(
    real_text, workers, monkeypatch
):
    monkeypatch.setattr(ram_cache, "_processes", lambda: PROCESSES)
    asked = {"dataset": real_text, "batch_size": 4, "num_workers": workers}
    expected = list(DataLoader(**asked))
    built = DataLoader(**Pretokenized().loader(asked))
    noted(real_text)

    Pretokenized().epoch(built)

    calls = noted(real_text)
    assert sorted(index for _, index in calls) == list(range(len(real_text)))
    processes = {process for process, _ in calls}
    assert len(processes) == PROCESSES
    assert os.getpid() not in processes
    for _ in range(2):
        assert all(map(torch.equal, list(built), expected))
    assert noted(real_text) == []


class Collator:
    def __init__(self):
        self.tokenizer = Tokenizer()

    def __call__(self, samples):
        return samples


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_the_same_bit_by_bit(workers):
    asked = {"dataset": Texts(), "batch_size": 4, "num_workers": workers}

    built = DataLoader(**Pretokenized().loader(asked))
    Pretokenized().epoch(built)
    found = list(built)

    assert store_of(built.dataset).count == 24
    for batch, expected in zip(found, DataLoader(**asked), strict=True):
        assert all(torch.equal(batch[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"dataset": Numbers()}, "holds no tokenizer"),
        ({"dataset": Numbers(), "collate_fn": Collator()}, "collate_fn tokenises"),
        ({"dataset": Masked()}, "draws random numbers"),
        ({"dataset": Stream()}, "iterable"),
    ],
)
def test_loaders_for_which_there_is_nothing_to_keep(asked, words):
    with pytest.raises(NotApplicable, match=words):
        Pretokenized().loader(asked)


def test_spawned_workers_that_would_not_find_the_store_are_left_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(caching, "DESCRIPTORS", tmp_path / "none")  # as on macOS
    asked = {"dataset": Texts(), "num_workers": 2, "multiprocessing_context": "spawn"}

    with pytest.raises(NotApplicable, match="spawned workers find the kept samples through"):
        Pretokenized().loader(asked)


def waiting(place):
    return profile(phases_ms={"data_wait": 50.0}, loaders=(loader(tokenizes=place),))


def test_it_is_offered_where_the_step_waits_for_a_tokenizer():
    assert Pretokenized.candidates(waiting("data set"), machine()) == [Pretokenized()]
    assert Pretokenized.candidates(waiting("collate_fn"), machine()) == ()
    assert (
        Pretokenized.candidates(profile(loaders=(loader(tokenizes="data set"),)), machine()) == ()
    )
    assert Pretokenized().predict(waiting("data set"), machine()).step_ms < -45


def test_a_collate_fn_that_tokenises_is_offered_more_workers():
    assert LoaderWorkers.candidates(waiting("collate_fn"), machine())


def test_a_time_without_sense_is_refused():
    with pytest.raises(ValueError, match="fill_s"):
        Pretokenized(fill_s=-1)
