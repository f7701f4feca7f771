"""Every operator of the training process, as it runs: listeners before and after it.

One dispatch mode for all probes of a pass. It changes no argument and no result, but it makes
torch.compile run eagerly without a word; so it is never entered where something was compiled.
"""

import sys
from typing import Any

from torch.utils import _python_dispatch

from flatout.seams.events import Listener
from flatout.seams.session import Session

ATTRIBUTE = "_flatout_operators"


Mode: Any = _python_dispatch.TorchDispatchMode


class Operators(Mode):  # type: ignore[misc]  # torch does not type its modes
    """Call the listeners around every operator, in every thread that torch takes it to."""

    supports_higher_order_operators = True  # flex_attention refuses modes that do not say so

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self.before: list[Listener] = []
        self.after: list[Listener] = []
        self.is_on = False
        self.is_entered = False

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator between the listeners; one that fails is recorded and left out."""
        del types
        if not self.is_on:
            return operator(*args, **(kwargs or {}))
        self.tell(self.before, operator, args)
        result = operator(*args, **(kwargs or {}))
        self.tell(self.after, operator, result)
        return result

    def tell(self, listeners: list[Listener], operator: Any, what: Any) -> None:
        """Call the listeners: quiet ones, see `Session.quietly`."""
        for listener in listeners:
            listener(operator, what)

    def enter(self) -> None:
        """Begin to listen. Once: whoever comes second finds the mode running."""
        self.is_on = True
        if not self.is_entered:
            self.is_entered = True
            self.__enter__()

    def leave(self) -> None:
        """Stop listening; below another mode this one stays where it is and lets all through."""
        self.is_on = False
        current = getattr(_python_dispatch, "_get_current_dispatch_mode", lambda: self)()
        if self.is_entered and current is self:
            self.is_entered = False
            self.__exit__(None, None, None)


def operators_of(session: Session) -> Operators:
    """Return the session's one mode."""
    found: Operators | None = getattr(session, ATTRIBUTE, None)
    if found is None:
        found = Operators(session)
        setattr(session, ATTRIBUTE, found)
    return found


def why_not(session: Session) -> str:
    """Return why operators may not be listened to, empty when they may."""
    for root in session.roots:
        for module in root.modules():
            if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
                return "the model is compiled"
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    if counters and counters["frames"].get("total"):
        return "torch.compile is at work"
    return ""
