"""Is each rung's time enough to prove what helps? Played through on trials made up for one H200."""

import math
import random
from dataclasses import dataclass, field, replace

import pytest

from benchmarks import ladder
from benchmarks.bench import Bench
from flatout.records.ablation import LossCheck
from flatout.records.machine import Device
from flatout.records.profile import ModelFacts, OptimizerFacts, PeakBytes, Spread
from flatout.records.trial import Applied, Outcome, Trial
from flatout.workflow.tune import tune
from tests.support.screens import play_screen, seen_of
from tests.techniques.facts import loader, machine, profile

H200 = Device(kind="cuda", name="NVIDIA H200", memory_bytes=150 * 10**9, compute_capability=(9, 0))
MACHINE = machine(
    device=H200,
    devices=(H200,),
    logical_cores=16,
    usable_cores=16,
    physical_cores=16,
    memory_bytes=2**37,
    shm_free_bytes=2**35,
    torch_version="2.11.0",
)
STEPS = 15
"""Warm-up, measured and traced steps of one trial."""
GUARD_STEPS = 20
SCREEN_STEPS = 8
"""Steps of one block of a screen, and what is left out after a switch."""
FIRST_GUARD, MORE_GUARD = 5, 2
"""Guard trials of the first recipe, and of each further one."""
HELPS = {
    "bf16_autocast": 0.45,
    "sdpa_attention": 0.8,
    "channels_last": 0.85,
    "torch_compile": 0.75,
    "regional_compile": 0.75,
    "fused_optimizer": 0.96,
    "cudnn_autotune": 0.99,
}
COMPILERS = {"torch_compile", "regional_compile"}


@dataclass(frozen=True, kw_only=True)
class Guess:
    """What a trial of a script should take; the step in fp32, the first and a later compilation."""

    start_s: float
    step_ms: float
    cold_s: float
    warm_s: float
    facts: dict = field(default_factory=dict)


GUESSES = {
    "gpt2": Guess(start_s=11, step_ms=400, cold_s=50, warm_s=14, facts={"softmax_modules": 12}),
    "resnet50": Guess(start_s=10, step_ms=300, cold_s=60, warm_s=16, facts={"conv_weights": 53}),
    "vit": Guess(start_s=10, step_ms=210, cold_s=45, warm_s=13, facts={"softmax_modules": 12}),
    "cifar": Guess(start_s=9, step_ms=70, cold_s=30, warm_s=10, facts={"conv_weights": 20}),
    "lora": Guess(start_s=10, step_ms=300, cold_s=40, warm_s=12),
}
"""Start: a second process, torch, the model. Not measured; steps from peak rates in fp32."""


@dataclass
class World:
    """Runs trials that take time on a clock of its own."""

    guess: Guess
    seed: int
    now: float = 0.0
    is_compiled: set = field(default_factory=set)
    judged: set = field(default_factory=set)

    def __post_init__(self):
        self.random = random.Random(self.seed)

    def clock(self):
        return self.now

    def step_ms(self, names):
        return self.guess.step_ms * math.prod(HELPS.get(name, 1.0) for name in names)

    def compiling_s(self, names):
        """Return what compiling takes; compiled before, it comes from the cache."""
        if not COMPILERS.intersection(names):
            return 0.0
        model = frozenset(names) - {"fused_optimizer", "foreach_optimizer"}
        is_known = model in self.is_compiled
        self.is_compiled.add(model)
        return self.guess.warm_s if is_known else self.guess.cold_s

    def trial_s(self, names, steps):
        return self.guess.start_s + steps * self.step_ms(names) / 1e3 + self.compiling_s(names)

    def screen(self, recipe, asked):
        """Return a screen that takes its time: start, blocks, and whatever is compiled in it."""
        began, startups, seen = self.now, {}, set()
        self.now += self.guess.start_s
        first = self.now
        played = play_screen(
            asked["choices"],
            lambda names: self.step_ms(names) / 1e3,
            lambda _: (
                (self.now - first) / asked["max_s"],
                max([0.0, *startups.values()]) / asked["max_s"],
            ),
            0.005,
            self.random,
        )
        for cell, names, plan, blocks in played:  # noqa: B007
            startup_s = 0.0 if cell in seen else self.compiling_s(names)
            seen.add(cell)
            for label in {x for x in cell if "compile" in x} - {*startups}:
                startups[label] = startup_s
            self.now += startup_s + SCREEN_STEPS * self.step_ms(names) / 1e3
        return Trial(
            recipe=recipe,
            outcome=Outcome.OK,
            wall_s=self.now - began,
            details={"probes": {"screen": seen_of(plan, blocks, startups)}},
        )

    def __call__(self, workload, recipe, machine, options):
        if "screen" in options.probes:
            return self.screen(recipe, options.probes["screen"])
        wall_s = self.trial_s(recipe.names, options.steps or STEPS)
        self.now += wall_s
        if options.probes:
            return Trial(recipe=recipe, outcome=Outcome.CRASH, message="unseen", wall_s=wall_s)
        step_ms = self.step_ms(recipe.names) * math.exp(self.random.gauss(0, 0.005))
        return Trial(
            recipe=recipe,
            outcome=Outcome.OK,
            profile=self.profile(step_ms, recipe.names),
            applied=tuple(Applied(technique=name, status="applied") for name in recipe.names),
            wall_s=wall_s,
            details={"load": {}},
        )

    def check(self, recipe):
        trials = MORE_GUARD if self.judged else FIRST_GUARD
        if recipe.label not in self.judged:
            self.judged.add(recipe.label)
            for number in range(trials):
                names = recipe.names if number >= trials - MORE_GUARD else ()
                self.now += self.trial_s(names, GUARD_STEPS)
        return LossCheck(status="within")

    def profile(self, step_ms, names):
        shares = {"data_wait": 0.01, "forward": 0.32, "backward": 0.62, "optimizer": 0.05}
        compiled = bool(COMPILERS.intersection(names))
        model = ModelFacts(
            name="Net",
            parameters=10**8,
            parameter_bytes=4 * 10**8,
            dtypes=("float32",),
            modules=100,
            repeated_blocks=12,
            used_autocast="bf16_autocast" in names,
            is_channels_last="channels_last" in names,
            is_compiled=compiled,
            compiled_by=next(iter(COMPILERS.intersection(names)), ""),
            **self.guess.facts,
        )
        return profile(
            kind="cuda",
            step_ms=Spread(median=step_ms, p10=step_ms, p90=step_ms, n=8),
            phases_ms={name: share * step_ms for name, share in shares.items()},
            samples_per_s=1e3 * 16 / step_ms,
            device_name=H200.name,
            device_busy_share=0.97,
            peak_bytes=PeakBytes(device=2**35),
            warmup_ms=500.0,
            loaders=(LOADER,),
            models=(model,),
            optimizers=(
                OptimizerFacts(
                    name="AdamW", parameters=10**8, has_fused_option=True, parameter_tensors=160
                ),
            ),
        )


LOADER = loader(dataset="TensorDataset", dataset_len=2048, batch_size=256, fetch_ms=1.0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rung", ladder.RUNGS, ids=lambda rung: rung.name)
def test_the_time_of_a_rung_is_enough_to_prove_what_helps(rung, seed, tmp_path, monkeypatch):
    world = World(guess=GUESSES[rung.name], seed=seed)
    monkeypatch.setattr(
        "flatout.workflow.tune.GuardChecker.check", lambda _, recipe: world.check(recipe)
    )

    def in_its_time(workload, options, tell, machine):
        asked = replace(options, runner=world, clock=world.clock)
        return tune(workload, asked, tell, machine)

    monkeypatch.setattr(ladder, "tune", in_its_time)
    bench = Bench(machine=MACHINE, work=tmp_path, say=lambda line: None)

    found = ladder.tuned(rung.most_s, bench, rung)

    may_compile = "compile" not in rung.off_topic
    assert found["is_proven"]
    assert "bf16_autocast" in found["recipe"]
    assert bool(COMPILERS.intersection(found["recipe"].split())) is may_compile
    assert world.now <= rung.most_s


def test_no_technique_on_made_up_data_is_tried():
    for rung in ladder.RUNGS:
        assert {"loader_workers", "ram_cache", "pinned_memory"} <= set(ladder.left_out(rung))
        assert "bf16_autocast" not in ladder.left_out(rung)
