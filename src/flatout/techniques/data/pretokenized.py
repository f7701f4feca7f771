"""Tokenise each text once, with all cores, and keep the tokens.

What it does: where the data set tokenises a text each time it is asked for it, makes all samples
once in forked processes before the first epoch and keeps them in memory that workers share. Once
the script changes its data set, they are not used any more.
When it helps: the step, or its workers, wait for the tokenizer.
What it costs: memory for the tokens; time at the start.
How it is checked: samples are compared, each asked for twice, before any is kept; batches are
bit-identical.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from flatout.agent.hooks.loader import COLLATE, DATA_SET, tokenizer_place
from flatout.analysis.feeding import is_starved
from flatout.data.caching import free_memory_bytes, is_cached, local_ranks
from flatout.data.proof.dataset_facts import DatasetFacts
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, Technique
from flatout.techniques.data.ram_cache import (
    RamCache,
    cache_samples,
    check_dataset,
    check_workers,
    fill_store,
    late_trouble,
)

MEMORY_SHARE = 0.5
"""Share of the free memory that the tokens may take: they are small alongside pictures."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Pretokenized(Technique):
    """Keep the tokens of each text."""

    family: ClassVar[str] = "data"
    addresses: ClassVar[frozenset[str]] = frozenset({"data_wait"})
    numerics: ClassVar[Numerics] = Numerics.EXACT
    stages: ClassVar[tuple[str, ...]] = ("tokenise",)
    by_hand: ClassVar[str] = """
Once, before the training; with Hugging Face's datasets:
+ dataset = dataset.map(tokenize, batched=True, num_proc=8)
"""

    fill_s: float = 60.0
    """Longest time for tokenising before the first epoch; the rest comes as it is used."""

    def __post_init__(self) -> None:
        if self.fill_s < 0:
            raise ValueError(f"fill_s={self.fill_s} must not be negative")

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["Pretokenized"]:
        """Return the technique when the step waits for a data set that holds a tokenizer."""
        del machine
        places = {loader.tokenizes for loader in profile.training_loaders}
        return [cls()] if is_starved(profile) and DATA_SET in places else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect what keeping samples brings: tokenising is all that such a data set does."""
        kept = RamCache(fill_s=self.fill_s).predict(profile, machine)
        return Effect(
            step_ms=kept.step_ms,
            startup_s=kept.startup_s,
            why="the data set tokenises each text in every epoch",
        )

    def loader(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Keep the samples of a data set that tokenises."""
        dataset = arguments["dataset"]
        if is_cached(dataset):
            return arguments
        kept = TOKENS.find(dataset, lambda: tokens_kept(arguments))
        check_workers(arguments)  # another loader of the same set may have others
        return {**arguments, "dataset": kept}

    def epoch(self, loader: Any) -> Any:
        """Tokenise everything before the first epoch, with all cores and for a bounded time."""
        if not is_cached(loader.dataset):
            TOKENS.known(loader.dataset)
            return loader
        fill_store(loader.dataset, limit_s=self.fill_s)
        return loader

    def end(self) -> str:
        """Say what the script changed, if it did."""
        return late_trouble()


TOKENS: DatasetFacts[Any] = DatasetFacts()
"""What stands for each data set that tokenises."""


def tokens_kept(arguments: Mapping[str, Any]) -> Any:
    """Return a data set that tokenises each of its texts once, for a loader's.

    Raises:
        NotApplicable: if it holds no tokenizer, or its samples are not the same each time.
    """
    dataset = arguments["dataset"]
    check_dataset(dataset)
    check_workers(arguments)
    place = tokenizer_place(dataset, arguments.get("collate_fn"))
    if place == COLLATE:
        raise NotApplicable(
            "the collate_fn tokenises whole batches: tokenise in the data set, or once before "
            "the training, and only pad there"
        )
    if place != DATA_SET:
        raise NotApplicable("the data set holds no tokenizer")
    budget = int(MEMORY_SHARE * free_memory_bytes() / local_ranks())
    return cache_samples(dataset, budget_bytes=budget)
