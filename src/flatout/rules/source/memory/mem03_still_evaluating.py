"""The model goes on training in evaluation mode."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.edits import insert_before, suggested
from flatout.analysis.source.script import Issue, Script, argument, names_in
from flatout.analysis.source.training import StepPart, is_without_gradients, step_parts


def check(script: Script) -> Iterator[Issue]:
    """Report loops of epochs that call `model.eval()` and train, but never `model.train()`."""
    trains_again = {script.source(call.func.value) for call in script.methods("train")}  # type: ignore[attr-defined]
    for part in step_parts(script):
        epochs = script.loops(part.node)
        if not epochs:
            continue
        epoch = epochs[0]
        for call in script.within(epoch, ast.Call):
            match call.func:
                case ast.Attribute(value=owner, attr="eval") if not call.args:
                    model = script.source(owner)
                case _:
                    continue
            if model in trains_again or part.node in script.ancestors(call):
                continue
            called = (script.source(each.func) for each in script.within(part.node, ast.Call))
            if model not in called or not _is_trained(script, part, model):
                continue
            # Where the epoch evaluates first, the switch at its start would change nothing.
            first = part.node if call.lineno < part.node.lineno else epoch.body[0]
            yield Issue(
                node=call,
                because=(
                    f"{model} stays in evaluation mode for the next epoch: no dropout, and batch "
                    "norm no longer learns its statistics"
                ),
                instead=f"{model}.train() at the start of each epoch",
                fix=suggested(insert_before(script, first, f"{model}.train()")),
            )
            return


def _is_trained(script: Script, part: StepPart, model: str) -> bool:
    """Return whether a step trains a model: a teacher or a perceptual loss is only called."""
    calls = [x for x in script.within(part.node, ast.Call) if script.source(x.func) == model]
    given = (
        argument(made, "params", 0)
        for made in script.calls("torch.optim.")
        if script.scope(made) is script.scope(part.node)
        and not script.called(made).startswith("torch.optim.lr_scheduler.")
    )
    names = [names_in(each) | names_in(script.origin(each)) for each in given if each is not None]
    is_given = not names or any(model.rpartition(".")[2] in each for each in names)
    return is_given and not all(is_without_gradients(script, call) for call in calls)
