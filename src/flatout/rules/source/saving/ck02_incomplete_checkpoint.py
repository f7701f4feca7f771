"""A checkpoint to go on from lacks the optimizer."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.script import Issue, Script, constant
from flatout.analysis.source.training import is_optimizer_step

RESUMES = frozenset({"epoch", "step", "iter", "iteration", "global_step", "start_epoch", "epochs"})


def check(script: Script) -> Iterator[Issue]:
    """Report saved records with a model's state and an epoch, but no optimizer's state."""
    stepped = [call for call in script.methods("step") if is_optimizer_step(script, call)]
    if not stepped or "load_state_dict" not in script.words:
        return
    for call in script.calls("torch.save"):
        if not call.args:
            continue
        saved = script.origin(call.args[0])
        if not isinstance(saved, ast.Dict) or None in saved.keys:
            continue
        keys = {str(constant(key)).lower() for key in saved.keys}
        text = script.source(saved).lower()
        has_model = "state_dict" in text
        if not has_model or not keys & RESUMES or "opt" in text or _is_best(script, call):
            continue
        yield Issue(
            node=call,
            because=(
                "the epoch is saved to go on from, but not the optimizer: its averages start from "
                "zero, and the loss jumps"
            ),
            instead="\"optimizer\": optimizer.state_dict(), and the scheduler's and the scaler's",
        )


def _is_best(script: Script, call: ast.Call) -> bool:
    """Return whether this is the file of the best model: it is kept to be used, not to go on."""
    text = script.source(script.statement(call)).lower()
    tests = [
        script.source(each.test).lower()
        for each in script.ancestors(call)
        if isinstance(each, ast.If)
    ]
    return any(word in part for part in (text, *tests) for word in ("best", "final", "acc"))
