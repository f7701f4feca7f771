"""A layer is replaced after the optimizer was made: the new one is never trained."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.script import Issue, Script, argument, root_name

TRAINS_WRONG = True


def check(script: Script) -> Iterator[Issue]:
    """Report `model.layer = nn.X(...)` below the optimizer of `model.parameters()`."""
    for made in script.calls("torch.optim."):
        given = argument(made, "params", 0)
        match given:
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
        after = block[next(i for i, each in enumerate(block) if each is statement) + 1 :]
        for each in after:
            if not isinstance(each, ast.Assign):
                continue
            target = each.targets[0]
            if script.called(each.value).startswith("torch.optim."):
                break  # made again
            is_layer = script.called(each.value).startswith("torch.nn.")
            if is_layer and isinstance(target, ast.Attribute) and root_name(target) == model:
                yield Issue(
                    node=each,
                    because=(
                        f"the optimizer of line {made.lineno} has the parameters of the layer that "
                        "was here before: these are never updated"
                    ),
                    instead="change the model first, then make the optimizer",
                )
