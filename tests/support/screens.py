"""A screen of a training that is made up: in each block the time that is true of its techniques."""

import math
from dataclasses import asdict

from flatout.analysis.screen import ScreenBlock, ScreenFactor, ScreenPlan

STEPS = 4
"""Steps of one block."""


def play_screen(choices, step_s, used_shares, noise, random):
    """Return the plan and the blocks of a screen; each cell is yielded before its block is timed.

    Args:
        choices: The techniques, as the probe is given them.
        step_s: Of the names of techniques, the seconds of one step.
        used_shares: Of the blocks so far, what `ScreenPlan.next_cell` asks for of the time.
        noise: Standard deviation of a block's time, in logs.
        random: Where the noise is drawn.
    """
    plan = ScreenPlan(
        [
            ScreenFactor(label=x["label"], group=x["group"], is_last="compile" in x["technique"])
            for x in choices
        ]
    )
    names = {x["label"]: x["technique"] for x in choices}
    blocks = []
    while (cell := plan.next_cell(blocks, *used_shares(blocks))) is not None:
        now = [names[label] for label in cell]
        stage = plan.stage.removeprefix("introduce ")
        timed = step_s(now) * math.exp(random.gauss(0, noise))
        blocks.append(ScreenBlock(on=cell, step_s=timed, steps=STEPS, stage=stage))
        yield cell, now, plan, blocks


def seen_of(plan, blocks, startup_s=()):
    """Return what the probe reports of it."""
    return {
        "blocks": [asdict(block) for block in blocks],
        "on": sorted(plan.on),
        "credit_from": plan.credit_from,
        "refused": {},
        "failed": {},
        "startup_s": dict(startup_s),
        "ended_early": False,
        "steps": STEPS * len(blocks),
    }
