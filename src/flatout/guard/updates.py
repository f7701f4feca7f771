"""What each optimizer step did, against its shadow, taken in the training process."""

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.guard.early import EarlySteps
from flatout.guard.gradients import scale_at_step
from flatout.guard.record import GuardRecord, OptimizerRecord, Update, find_record, rank_path
from flatout.guard.shadow import Shadow
from flatout.guard.structure import describe_optimizer, settings_of
from flatout.seams.ranks import own_rank

if TYPE_CHECKING:
    import torch


class UpdateNotes:
    """The first steps of every optimizer beside the shadow of the reference's optimizer."""

    def __init__(
        self, steps: int, reference: str | Path | None, early: EarlySteps | None = None
    ) -> None:
        """Follow the optimizers of this rank's record at `reference`; the script's own without."""
        self._early = early or EarlySteps()
        self._steps = steps
        self._path = reference
        self._records: dict[int, OptimizerRecord] = {}
        self._shadows: dict[int, Shadow] = {}
        self._updates: list[Update] = []
        self._gaps: dict[int, str] = {}

    @functools.cached_property
    def _reference(self) -> GuardRecord | None:
        """The baseline's record of the same rank, which is not known before the training begins."""
        if self._path is None:
            return None
        return find_record(rank_path(Path(self._path), own_rank()))

    @property
    def has_reference(self) -> bool:
        """Whether a baseline's optimizers are followed."""
        return self._reference is not None

    def before_step(
        self,
        number: int,
        step: int,
        optimizer: "torch.optim.Optimizer",
        named: "Mapping[str, torch.nn.Parameter]",
    ) -> None:
        """Note the settings of the step and copy what it starts from."""
        self._note_settings(number, optimizer, named)
        if step > self._steps or number in self._gaps:
            return
        try:
            if number not in self._shadows:
                self._shadows[number] = Shadow(optimizer, self._model_for(number), named)
                self._note_left_out(number)
            shadow = self._shadows[number]
            shadow.take_parameters(self._early)
            shadow.take_gradients(scale_at_step(optimizer), self._early)
        except Exception as error:  # noqa: BLE001  the rest of the guard goes on; the gap is told
            self._gaps[number] = f"optimizer {number}: {type(error).__name__}: {error}"

    def after_step(
        self, number: int, step: int, optimizer: "torch.optim.Optimizer", *, backwards_inside: int
    ) -> None:
        """Let the shadow step and keep the difference."""
        if step > self._steps or number in self._gaps:
            return
        if backwards_inside > 1:
            self._gaps[number] = f"optimizer {number}: its closure runs backward more than once"
            return
        try:
            shadow = self._shadows[number]
            if backwards_inside:
                shadow.take_gradients(scale_at_step(optimizer), self._early)
            tensors = shadow.step(self._settings_for(number, step))
        except Exception as error:  # noqa: BLE001  the rest of the guard goes on; the gap is told
            self._gaps[number] = f"optimizer {number}: {type(error).__name__}: {error}"
            return
        self._updates.append(Update(optimizer=number, step=step, tensors=tensors))

    def forget(self, number: int) -> None:
        """Take a step back that had no gradients: nothing was updated."""
        record = self._records.get(number)
        if record is not None:
            self._records[number] = replace(record, settings=record.settings[:-1])

    def by_hand(self) -> None:
        """Note that no optimizer makes the updates."""
        self._gaps.setdefault(-1, "the script updates its parameters without an optimizer")

    def optimizers(self) -> tuple[OptimizerRecord, ...]:
        """Return the optimizers that stepped, in the order of construction."""
        return tuple(self._records[number] for number in sorted(self._records))

    def updates(self) -> tuple[Update, ...]:
        """Return every update that was compared."""
        return tuple(self._updates)

    def gaps(self) -> tuple[str, ...]:
        """Return why updates were not compared, one line for each optimizer concerned."""
        return tuple(self._gaps.values())

    def _note_settings(
        self,
        number: int,
        optimizer: "torch.optim.Optimizer",
        named: "Mapping[str, torch.nn.Parameter]",
    ) -> None:
        if number not in self._records:
            names = {id(parameter): name for name, parameter in named.items()}
            self._records[number] = describe_optimizer(number, optimizer, names)
        record = self._records[number]
        settings = (*record.settings, settings_of(optimizer))
        self._records[number] = replace(record, settings=settings)

    def _model_for(self, number: int) -> OptimizerRecord:
        """Return the optimizer to shadow: the reference's, else the script's own.

        Raises:
            LookupError: if the reference has no such optimizer, or cannot be read.
        """
        if self._path is None:
            return self._records[number]
        if self._reference is None:
            raise LookupError("the baseline's record cannot be read")
        for record in self._reference.optimizers:
            if record.number == number:
                return record
        raise LookupError("the baseline has no such optimizer")

    def _settings_for(self, number: int, step: int) -> tuple[Mapping[str, Any], ...]:
        return self._model_for(number).settings[step - 1]

    def _note_left_out(self, number: int) -> None:
        left_out = self._shadows[number].left_out
        if left_out:
            self._gaps[-2 - number] = (
                f"optimizer {number}: its {left_out} largest tensors were left out"
            )
