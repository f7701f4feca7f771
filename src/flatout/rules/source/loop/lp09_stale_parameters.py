"""A layer is replaced after the optimizer was made: the new one is never trained."""

import ast
import re
from collections.abc import Iterator

from flatout.analysis.source.script import (
    Issue,
    Script,
    argument,
    last_name,
    names_in,
    root_name,
)

TRAINS_WRONG = True
LAYERS = re.compile(
    r"^torch\.nn\.(?!\w*Loss$)\w*(Linear|Conv|Embedding|Norm|LSTM|GRU|RNN|Attention|Transformer|Sequential"
    r"|Parameter)"
)
"""What has parameters of its own; losses, activations and wrappers have none."""


def check(script: Script) -> Iterator[Issue]:
    """Report `model.layer = nn.X(...)` below the optimizer of `model.parameters()`."""
    if "add_param_group" in script.words:
        return  # the new ones may be added
    for made in script.calls("torch.optim."):
        match argument(made, "params", 0):
            case ast.Call(func=ast.Attribute(value=ast.Name(id=model), attr="parameters")):
                pass
            case _:
                continue
        statement = script.statement(made)
        block = script.block(statement)
        if (
            not isinstance(statement, ast.Assign)
            or not script.called(made).rpartition(".")[2][0].isupper()
        ):
            continue
        after = block[block.index(statement) + 1 :]
        below = [each for each in after if isinstance(each, ast.Assign)]
        made_again = [at for at, each in enumerate(below) if _optimizes(script, each.value, model)]
        for each in below[made_again[-1] + 1 if made_again else 0 :]:
            target = each.targets[0]
            is_layer = LAYERS.search(script.called(each.value)) and not _keeps(each.value, model)
            if is_layer and isinstance(target, ast.Attribute) and root_name(target) == model:
                yield Issue(
                    node=each,
                    because=(
                        f"the optimizer of line {made.lineno} has the parameters of the layer that "
                        "was here before: these are never updated"
                    ),
                    instead="change the model first, then make the optimizer",
                )


def _optimizes(script: Script, made: ast.expr, model: str) -> bool:
    """Return whether an optimizer is made of a model."""
    if not isinstance(made, ast.Call) or not script.called(made).startswith("torch.optim."):
        return False
    given = argument(made, "params", 0)
    return given is not None and model in names_in(given)


def _keeps(made: ast.expr, model: str) -> bool:
    """Return whether a layer is made around those of the model: the optimizer has their weights."""
    match made:
        case ast.Call(func=func, args=args) if last_name(func) in {"Sequential", "Parameter"}:
            return any(model in names_in(each) for each in args)
    return False
