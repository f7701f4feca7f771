"""A made-up starved job whose truth is known: what the demo's record measured, by its own clock."""

import math
import random
from dataclasses import dataclass, field, replace

from flatout.records.ablation import LossCheck
from flatout.records.profile import ModelFacts, Spread
from flatout.records.trial import Applied, Outcome, Trial
from flatout.tuning.experiments import key_of
from tests.workflow.test_tune import profile

STEP_MS, DATA_MS = 127.0, 89.0
FACTORS = {
    "loader_workers": 0.87,
    "ram_cache": 0.90,
    "bf16_autocast": 0.86,
    "channels_last": 0.92,
    "torch_compile": 0.97,
    "regional_compile": 1.02,
    "fused_optimizer": 1.01,
    "read_ahead": 0.98,
    "shared_transforms": 1.0,
}
"""True factor of the step by technique, from the records of starved_images; compilation from
slow_compute's, where it changed little."""
WITH_THREADS = 0.76
"""One thread for the training beside two workers; without workers it is slower."""
THREADS_ALONE = 1.25
COMPILE_S = (20.0, 3.0)
"""Start-up of compiled trials, the first and the later ones."""
GUARD_S = 5.0


@dataclass
class StarvedWorld:
    """Runs trials and guard checks of the starved job; its clock goes by what they would take."""

    seed: int = 0
    now: float = 0.0
    seen: dict[str, int] = field(default_factory=dict)
    checked: set[str] = field(default_factory=set)

    def __post_init__(self):
        self.random = random.Random(self.seed)

    def __call__(self, workload, recipe, machine, options):
        names = recipe.names
        self.seen[recipe.label] = self.seen.get(recipe.label, 0) + 1
        if "packed_data" in names:
            self.now += 2.5
            applied = (Applied(technique="packed_data", status="not_applicable", why="random"),)
            return Trial(recipe=recipe, outcome=Outcome.REFUSED, applied=applied, wall_s=2.5)
        wall_s = 3.3 if not names else 5.3
        if {"torch_compile", "regional_compile"} & set(names):
            wall_s += COMPILE_S[self.seen[recipe.label] > 1]
        self.now += wall_s
        return Trial(
            recipe=recipe,
            outcome=Outcome.OK,
            profile=self.profile_of(names),
            applied=tuple(Applied(technique=name, status="applied") for name in names),
            wall_s=wall_s,
        )

    def check(self, recipe):
        """Take the time of a guard's look; the first one makes the reference too."""
        if key_of(recipe) not in self.checked:
            self.now += GUARD_S * (1 if self.checked else 5)
        self.checked.add(key_of(recipe))
        return LossCheck(status="within")

    def true_ratio(self, names):
        """Return how many times faster than the baseline a recipe is."""
        factor = math.prod(FACTORS.get(name, 1.0) for name in names)
        if "cpu_threads" in names:
            factor *= WITH_THREADS if "loader_workers" in names else THREADS_ALONE
        return 1 / factor

    def profile_of(self, names):
        """Return the profile of one trial, with the noise that such trials have."""
        noise = 0.03 if not names else 0.055
        step_ms = STEP_MS / self.true_ratio(names) * math.exp(self.random.gauss(0, noise))
        has_workers = "loader_workers" in names
        wait_ms = 0.05 * step_ms if has_workers else DATA_MS / STEP_MS * step_ms
        rest_ms = step_ms - wait_ms
        base = profile(step_ms)
        loader = replace(
            base.loaders[0], num_workers=2 if has_workers else 0, dataset_len=360, fetch_ms=DATA_MS
        )
        model = ModelFacts(
            name="ResNet",
            parameters=1_232_553,
            parameter_bytes=4_930_212,
            dtypes=("float32",),
            conv_weights=12,
            is_channels_last="channels_last" in names,
            modules=34,
            calls_per_step=1.0,
            input_shapes=1,
        )
        return replace(
            base,
            step_ms=Spread(median=step_ms, p10=step_ms, p90=step_ms, n=9),
            phases_ms={
                "data_wait": wait_ms,
                "h2d": 0.0,
                "forward": 0.45 * rest_ms,
                "backward": 0.5 * rest_ms,
                "optimizer": 0.03 * rest_ms,
                "other": 0.02 * rest_ms,
            },
            samples_per_step=16.0,
            delay_share=0.6 if has_workers and "cpu_threads" not in names else 0.0,
            epoch_steps=22,
            loaders=(loader,),
            models=(model,),
            cpu_threads=1 if "cpu_threads" in names else 2,
        )
