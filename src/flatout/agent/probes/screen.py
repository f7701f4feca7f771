"""Switch techniques on and off while the script trains, and note how long its steps take.

What is switched when is decided here, at the end of whole steps, by `flatout.analysis.screen`: the
same blocks always give the same cells. Ranks share what the first of them measured and what failed
on any of them, so all switch at the same step. Order, random streams and numbers are not the
script's: nothing but the time is taken from this run.
"""

import itertools
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from flatout.agent.session import Session
from flatout.agent.switching import SCREEN_LOG, FetcherSwitches, SwitchBoard
from flatout.agent.training_device import find_cuda_device
from flatout.analysis.screen import Cell, ScreenBlock, ScreenFactor, ScreenPlan, find_suspects
from flatout.analysis.steps import is_dirty, running_anchor, step_of, steps_of, usual_work
from flatout.hardware.load import LoadReading, load_meter, process_tree
from flatout.records import catalogue
from flatout.records.recipe import Choice, Recipe
from flatout.records.trial_result import Segment

WARM = 6
"""Whole steps before the first switch; discovery of the models is over by then."""
WARM_MOST = 60
"""The same where an optimizer never steps, or no model is found."""
BLOCK_S = 0.4
"""Time of a block: the load of the cores is counted in ticks of 10 ms."""
FEWEST, MOST = 3, 400
"""Steps of a block."""
FEWEST_ON_GPU = 2
"""The same where events of the device time them: blocks of equal cells differ by 0.3 %."""
WANTED_BLOCKS = 50
"""Blocks for which the steps of one are shortened to two, where steps are long."""
SETTLE, SETTLE_FIRST = 1, 3
"""Steps left out after a switch, and after a switch to what was never on before: it compiles."""
NOT_FINITE = "the loss was not finite"
MIXED = "an evaluation, a save or the start of an epoch was in most of its steps"


@dataclass(slots=True)
class OpenBlock:
    """The block that is under way, or whose device times are not known yet."""

    on: Cell
    wanted: int
    settle: int
    is_first: bool
    walls_s: list[float] = field(default_factory=list)
    settling_s: list[float] = field(default_factory=list)
    clean: list[bool] = field(default_factory=list)
    samples: int = 0
    load: LoadReading | None = None
    load_share: float = 0.0
    stage: str = ""
    at_s: float = 0.0
    left_out: str = ""
    losses: list[torch.Tensor] = field(default_factory=list)
    """Those on a device: reading one would wait for it."""
    marks: list[Any] = field(default_factory=list)
    """On a GPU: events at the ends of steps, one before the first."""
    is_finite: torch.Tensor | None = None
    done: Any = None
    """The event after which `is_finite` is known."""


def start(session: Session, options: Mapping[str, Any]) -> "Screening":
    """Screen the techniques in `options["choices"]`.

    Each has label, technique, settings, group and partners, as `ScreenFactor` has them.
    `options["max_s"]` bounds the time from the first step on, `options["seed"]` the order.
    """
    screening = Screening(session, options)
    session.on("lap", screening.saw_segment)
    return screening


class Screening:
    """One screen: the blocks so far, and the one under way."""

    def __init__(self, session: Session, options: Mapping[str, Any]) -> None:
        self.session, self.options = session, options
        built = catalogue.build(Recipe(choices=tuple(_choice(item) for item in options["choices"])))
        labels = [item["label"] for item in options["choices"]]
        techniques = dict(zip(labels, built, strict=True))
        fetchers = FetcherSwitches(session, techniques)
        if fetchers.techniques:
            fetchers.install()
        self.board = SwitchBoard(session, techniques, fetchers)
        self.plan: ScreenPlan | None = None
        self.blocks: list[ScreenBlock] = []
        self.startup_s: dict[str, float] = {}
        self.stopped = ""
        self.block: OpenBlock | None = None
        self.pending: list[OpenBlock] = []
        """Blocks whose device times are not known yet."""
        self.parts: list[Segment] = []
        """Segments of the step under way."""
        self.anchor: int | None = None
        self.block_steps = 0
        self.usual = 0, 0
        """Evaluations and starts of a loader that most steps hold."""
        self.steps = 0
        self.began_s: float | None = None
        self.seen: set[Cell] = set()
        self.device: Any = None
        self.mark: Any = None
        self.meter = load_meter()
        self.is_over = False
        self.was_finite = False
        self.is_ruined = False
        """Whether the weights are no numbers any more: only a fresh process can go on."""
        self.before: Cell = ()
        """What was on in the block before."""
        self.whos: frozenset[int] = frozenset()
        self.log = Path(session.spec.folder) / SCREEN_LOG.replace("*", str(os.getpid()))

    def saw_segment(self, segment: Segment) -> None:
        """Follow the steps; a fault of the screen's own ends it, with what is known."""
        if self.is_over:
            return
        try:
            self._saw_segment(segment)
        except Exception as error:
            self._finish(f"{type(error).__name__}: {error}")
            raise

    def _saw_segment(self, segment: Segment) -> None:
        """Put segments together to whole steps; what takes time here belongs to none."""
        self.parts.append(segment)
        if self.began_s is None:
            self.began_s = self.session.clock.now()
        if self.plan is None:
            self._warm_up()
        elif segment.who == self.anchor:
            self._saw_step(self.parts)
            self.parts = []
        elif segment.who not in self.whos or len(self.parts) > MOST:
            self._finish("the script began another training")
        self.session.clock.lap()

    def result(self) -> Mapping[str, Any]:
        """Return the blocks, and what became of each technique."""
        self._resolve(waits=True)
        return {
            "blocks": [asdict(block) for block in self.blocks],
            "factors": [asdict(factor) for factor in self.plan.factors] if self.plan else [],
            "on": sorted(self.plan.on) if self.plan else [],
            "open": list(self.plan.open) if self.plan else [],
            "stage": self.plan.stage if self.plan else "",
            "credit_from": self.plan.credit_from if self.plan else None,
            "refused": self.board.refused,
            "failed": self.board.failed,
            "startup_s": self.startup_s,
            "stopped": self.stopped,
            "ended_early": self.is_ruined,
            "block_steps": self.block_steps,
            "steps": self.steps,
        }

    def _warm_up(self) -> None:
        """Wait until every optimizer has made steps and the models are known, then begin."""
        session = self.session
        counts = session.counts
        if not session.segments:
            return
        is_known = session.is_marked or session.knows_optimizers
        is_ready = session.knows_roots and is_known and min(counts.values()) >= WARM
        if not (is_ready or max(counts.values()) >= WARM_MOST):
            return
        whos = [each.who for each in session.segments]
        if running_anchor(whos) != whos[-1]:
            return
        if not session.roots:
            self._finish("no training call of a model was seen")
            return
        self.anchor, self.whos = whos[-1], frozenset(whos)
        self.parts = []
        self.device = find_cuda_device(session)
        self._begin()

    def _begin(self) -> None:
        session = self.session
        self.usual = usual_work(steps_of(session.segments))
        ends = [each.end for each in session.segments if each.who == self.anchor][-WARM:]
        step_s = statistics.median(b - a for a, b in itertools.pairwise(ends))
        wanted = math.ceil(BLOCK_S / max(step_s, 1e-6))
        affordable = round(float(self.options["max_s"]) / WANTED_BLOCKS / step_s) - SETTLE
        fewest = FEWEST if self.device is None else FEWEST_ON_GPU
        # As many again as a switch of the data leaves out.
        enough = max(fewest, wanted, self.board.in_flight)
        steps = max(2, min(enough, max(2, affordable), MOST))
        workers = max([0, *self._workers()])
        self.block_steps = -(-steps // workers) * workers if workers > 1 else steps
        self.board.begin()
        switches = self.board.switches
        factors = [
            ScreenFactor(
                label=item["label"],
                group=item["group"],
                partners=tuple(item["partners"]),
                is_last=switches[item["label"]].is_last,
            )
            for item in self.options["choices"]
            if item["label"] in switches
        ]
        self.plan = ScreenPlan(factors, seed=int(self.options["seed"]))
        shared = self._shared({"block_steps": self.block_steps})
        self.block_steps = shared[0]["block_steps"]
        self._drop_lost()
        self._next_block()

    def _workers(self) -> list[int]:
        """Return how many workers each loader has."""
        loaders = self.session.loaders.values()
        return [seen.asked.get("effective_workers") or 0 for seen in loaders]

    def _saw_step(self, parts: Sequence[Segment]) -> None:
        block = self.block
        assert block is not None
        self.steps += 1
        step = step_of(parts)
        if not self._is_finite(parts, block):
            # Also what was on before: the last update of a block shows in the next one's loss.
            self._saw_not_finite(block.on or self.before)
            if self.is_over:
                return
        if len(block.settling_s) < block.settle:
            block.settling_s.append(step.wall_s)
            if len(block.settling_s) == block.settle:
                block.load = self._load()
                self._put_mark(block)
            return
        block.walls_s.append(step.wall_s)
        block.clean.append(not is_dirty(step, self.usual))
        block.samples += step.samples
        self._put_mark(block)
        if len(block.walls_s) >= block.wanted or (self.board.trouble and not self._has_ranks()):
            self._end_block(block)

    def _end_block(self, block: OpenBlock) -> None:
        if block.load is not None:
            load = self.meter.between(block.load, self._load())
            block.load_share = load.foreign_share + load.steal_share
        self.before = block.on
        self.board.check()
        if self.board.trouble:
            block.left_out = self.board.trouble
        self._ask_finite(block)
        self.pending.append(block)
        self._resolve(waits=False)
        self._drop_lost()
        if not self.is_over:
            self._next_block()

    def _next_block(self) -> None:
        assert self.plan is not None
        max_s = float(self.options["max_s"])
        took_s = self.session.clock.now() - (self.began_s or 0.0)
        mine = {"took_s": took_s, "startup_s": max([0.0, *self.startup_s.values()])}
        first = self._shared(mine)[0]
        shares = first["took_s"] / max_s, first["startup_s"] / max_s
        cell = self.plan.next_cell(self.blocks, *shares)
        if cell is None:
            self._finish("")
            return
        self._note({"on": cell})
        self.board.turn_to(cell)
        is_first = cell not in self.seen
        self.seen.add(cell)
        settle = SETTLE_FIRST if is_first else SETTLE
        settle += self.board.steps_until_seen(self.before)
        stage = self.plan.stage.removeprefix("introduce ")
        at_s = self.session.clock.now()
        self.block = OpenBlock(cell, self.block_steps, settle, is_first, stage=stage, at_s=at_s)

    def _drop_lost(self) -> None:
        """Take techniques that are off for good out of the plan, on every rank the same."""
        board, plan = self.board, self.plan
        assert plan is not None
        if board.trouble:
            on = self.block.on if self.block else ()
            blamed = find_suspects(on, self.blocks)[-1]
            board.fail(blamed, f"together with {_others(on, blamed)}: {board.trouble}")
            board.trouble = ""
        mine = {"failed": board.failed, "refused": board.refused, "ruined": self.is_ruined}
        for theirs in self._shared(mine):
            self.is_ruined |= theirs["ruined"]
            for label, why in theirs["failed"].items():
                board.fail(label, why)
            for label, why in theirs["refused"].items():
                board.refuse(label, why)
        for label in {*board.failed, *board.refused}:
            plan.drop(label)
        if self.is_ruined:
            self._finish(NOT_FINITE)

    def _resolve(self, *, waits: bool) -> None:
        """Turn blocks into what the plan reads, those whose device times are known by now."""
        found = []
        while self.pending:
            block = self.pending[0]
            if block.done is not None and not (waits or block.done.query()):
                break
            self.pending.pop(0)
            found.append(self._closed(block))
        if not waits:
            found = self._shared({"blocks": found})[0]["blocks"]
        self.blocks += found
        for one in found:
            self._note({"block": asdict(one)})

    def _closed(self, block: OpenBlock) -> ScreenBlock:
        walls_s = block.walls_s
        if block.marks:
            pairs = itertools.pairwise(block.marks)
            walls_s = [first.elapsed_time(last) / 1e3 for first, last in pairs]
        clean = [wall_s for wall_s, is_clean in zip(walls_s, block.clean, strict=False) if is_clean]
        is_mixed = 2 * len(clean) < len(walls_s) or not clean
        used = walls_s if is_mixed else clean
        left_out = block.left_out or (MIXED if is_mixed else "")
        if block.is_finite is not None and not block.is_finite.item():
            self._saw_not_finite(block.on)
        elif block.is_finite is not None:
            self.was_finite = True
        lost = [label for label in block.on if label not in self.board.switches]
        if lost or not used:
            left_out = f"{', '.join(lost)} failed in it"
        step_s = statistics.fmean(used) if self._is_bursty() else statistics.median(used)
        if block.is_first:
            new = [label for label in block.on if label not in self.startup_s]
            extra_s = sum(block.settling_s) - len(block.settling_s) * step_s
            self.startup_s |= dict.fromkeys(new, max(0.0, extra_s)) if len(new) == 1 else {}
        return ScreenBlock(
            on=block.on,
            step_s=step_s,
            steps=len(used),
            stage=block.stage,
            at_s=block.at_s,
            samples=block.samples / max(1, len(block.walls_s)),
            load_share=block.load_share,
            left_out=left_out,
        )

    def _is_bursty(self) -> bool:
        """Return whether work comes in bursts: batches of workers, or what a technique puts off."""
        comes_rarely = any(switch.comes_rarely for switch in self.board.switches.values())
        return comes_rarely or any(self._workers())

    def _is_finite(self, parts: Sequence[Segment], block: OpenBlock) -> bool:
        """Return whether the losses are numbers; those on a device are asked at the block's end."""
        losses = [loss for part in parts for loss in part.losses]
        block.losses += [loss for loss in losses if isinstance(loss, torch.Tensor)]
        known = [float(loss) for loss in losses if not isinstance(loss, torch.Tensor)]
        is_finite = all(map(math.isfinite, known))
        self.was_finite |= is_finite and bool(known)
        return is_finite

    def _saw_not_finite(self, on: Cell) -> None:
        """End the run, whose weights are ruined, where a technique is why; the screen goes on."""
        if not (on and self.was_finite):
            self.was_finite = False  # the script's own losses are so: no technique is to blame
            return
        blamed = find_suspects(on, self.blocks)[-1]
        self.board.fail(blamed, NOT_FINITE)
        self.is_ruined = True
        if not self._has_ranks():  # else all end together, at the end of the block
            self._finish(NOT_FINITE)

    def _ask_finite(self, block: OpenBlock) -> None:
        """Have a device say whether the block's losses are numbers; nothing waits for it."""
        if self.device is None or not block.marks:
            return
        if block.losses:
            losses = torch.stack([loss.reshape(()).to(self.device) for loss in block.losses])
            block.is_finite = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
            block.is_finite.copy_(torch.isfinite(losses).all(), non_blocking=True)
            block.losses.clear()
        block.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        block.done.record(torch.cuda.current_stream(self.device))

    def _put_mark(self, block: OpenBlock) -> None:
        """Record an event on the training's device; nothing waits for it."""
        if self.device is None or torch.cuda.is_current_stream_capturing():
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        block.marks.append(event)

    def _load(self) -> LoadReading:
        root = self.session.spec.root_pid if self._has_ranks() else None
        return self.meter.read(process_tree(root or os.getpid()))

    def _has_ranks(self) -> bool:
        group = torch.distributed
        return group.is_available() and group.is_initialized() and group.get_world_size() > 1

    def _shared(self, mine: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return what every rank says, the first rank's first; all of them are here now."""
        if not self._has_ranks():
            return [mine]
        found: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(found, mine)
        return found

    def _finish(self, why: str) -> None:
        self.is_over, self.stopped = True, why
        self.session.fire("enough")

    def _note(self, row: Mapping[str, Any]) -> None:
        if self.session.spec.folder:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def _choice(item: Mapping[str, Any]) -> Choice:
    return Choice(technique=item["technique"], settings=item["settings"])


def _others(on: Cell, label: str) -> str:
    return ", ".join(name for name in on if name != label)
