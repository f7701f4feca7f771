"""Let an optimizer update each parameter as soon as backward has its gradient.

The first step shows whether that is allowed: gradients that are read, clipped, scaled or added up
between backward and the step cannot be used up in backward. Then each gradient is freed at once.
"""

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from flatout.agent import optimizer_swap as whole_steps
from flatout.agent import patching
from flatout.agent.events import tell
from flatout.agent.optimizer_swap import bare_step
from flatout.agent.training_device import live_optimizers

FREE_READERS = ("torch.optim", "torch.nn.modules.module", "torch.autograd", "torch.nn.parameter")
"""Modules whose look at a gradient means nothing: zeroing it, the step itself."""
OWN = "flatout."
SCALER = "torch.amp.grad_scaler"
ADDED_UP = (
    "gradients are added up over several backwards, and optimizer_in_backward has used the first "
    "one up already: take the technique out of the recipe"
)
SET_BETWEEN = (
    "the loop sets its rate between backward and step, and optimizer_in_backward has updated by "
    "the one before: take the technique out of the recipe"
)


class GradientWatch:
    """Sees who looks at gradients, and how many backwards make one, until the first step."""

    def __init__(self) -> None:
        self.readers: set[str] = set()
        self.backwards = 0
        self._settings: dict[int, dict[str, Any]] = {}
        """By the identity of a group its numbers when the first backward ended."""
        self._patches: list[patching.Patch] = []
        self._is_over = False

    def begin(self) -> None:
        """Put a property over the parameters' gradients that notes who asks; count backwards."""
        if "grad" not in vars(torch.nn.Parameter):
            self._watch_gradients()
        order = patching.Order.TECHNIQUE
        self._patches.append(patching.wrap(torch.autograd, "backward", self._counting, order=order))

    def _counting(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.backwards += not self._is_over
            result = backward(*args, **kwargs)
            if not (self._is_over or self._settings):
                self._note_settings()
            return result

        return counted

    def end(self) -> None:
        """Take the property away and count no more."""
        self._is_over = True
        for patch in self._patches:
            patch.undo()

    def sees_change(self, optimizer: Optimizer) -> bool:
        """Return whether the numbers of an optimizer's groups were set since the backward."""
        known = [(g, self._settings.get(id(g), {})) for g in optimizer.param_groups]
        return any(_differs(group, before) for group, before in known)

    def _note_settings(self) -> None:
        self._settings = {
            id(group): _numbers(group, each.defaults)
            for each in live_optimizers()
            for group in each.param_groups
        }

    def _watch_gradients(self) -> None:
        inherited: Any = torch.Tensor.grad
        note = self.readers.add

        def get(parameter: torch.Tensor) -> Any:
            found = inherited.__get__(parameter)
            name = sys._getframe(1).f_globals.get("__name__", "")
            if found is not None and not name.startswith((*FREE_READERS, OWN)):
                note(name)
            return found

        def put(parameter: torch.Tensor, value: Any) -> None:
            inherited.__set__(parameter, value)

        def remove(parameter: torch.Tensor) -> None:
            inherited.__delete__(parameter)

        watched = property(get, put, remove)
        self._patches.append(patching.swapped(torch.nn.Parameter, "grad", watched))


def find_obstacle(optimizer: Optimizer, watch: GradientWatch) -> str | None:
    """Return why this optimizer cannot step in backward, or None; asked in its first step."""
    return next(_obstacles(optimizer, watch), None)


def _obstacles(optimizer: Optimizer, watch: GradientWatch) -> Iterator[str]:
    kind = type(optimizer)
    who = whole_steps.find_need(optimizer)
    if who is not None:
        yield f"{who} needs whole steps"
    if not kind.step.__module__.startswith("torch.optim.") or kind is torch.optim.LBFGS:
        yield f"{kind.__name__} may need all gradients at once: its step is not torch's own"
    if any(other is not optimizer for other in live_optimizers()):
        yield "there is another optimizer, whose backward may reach these parameters"
    yield from _of_parameters(optimizer)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        yield "gradients are averaged over processes, after backward made them"
    if _is_scaled() or SCALER in watch.readers:
        yield "GradScaler unscales all gradients before the step"
    if watch.backwards > 1:
        yield f"gradients are added up over several backwards ({watch.backwards} before the step)"
    if watch.sees_change(optimizer):
        yield "rates are set between backward and step: updates in backward would have the old ones"
    yield from _of_readers(sorted(watch.readers))


def _of_parameters(optimizer: Optimizer) -> Iterator[str]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if len(optimizer.state):
        yield "the optimizer made a step or was loaded already"
    if len({p.device for p in parameters}) > 1:
        yield "its parameters lie on several devices, and backward runs in a thread for each"
    if all(p.grad is None for p in parameters):
        yield "the step has no gradients when it begins: it runs backward itself"


def _of_readers(readers: list[str]) -> Iterator[str]:
    if any("clip_grad" in name for name in readers):
        yield "gradients are clipped, which needs all of them"
    if readers:
        yield f"gradients are read between backward and step, in {', '.join(readers)}"


def _is_scaled() -> bool:
    """Return whether a GradScaler that is on makes the step; scripts keep one that is off."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == SCALER:
            return bool(getattr(frame.f_locals.get("self"), "_enabled", True))
        frame = frame.f_back
    return False


def _numbers(group: dict[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Return what an update is computed with: rates, decays, momentums.

    Not what a script notes in a group by other names than the optimizer's own.
    """
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name in known
        and isinstance(value, int | float | tuple | torch.Tensor)
        and not isinstance(value, bool)
    }


def _differs(group: dict[str, Any], before: dict[str, Any]) -> bool:
    now = _numbers(group, before)
    return any(now.get(name, value) != value for name, value in before.items())


def step_in_backward(optimizer: Optimizer) -> Callable[[], None]:
    """Update each parameter in backward from now on and free its gradient; return what ends that.

    The script's `step()` goes on to be called and finds nothing to do. State and state_dict are the
    optimizer's own. Called while a step runs, that step is made parameter by parameter too.
    """
    stepper = _Stepper(optimizer)
    # Python's collector does not see what such hooks hold: they would keep the model for ever.
    weak = weakref.ref(stepper)
    whole_steps.part(optimizer)
    handles = [
        parameter.register_post_accumulate_grad_hook(functools.partial(_update, weak, place))
        for place, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if parameter.requires_grad
    ]
    handles.append(optimizer.register_step_pre_hook(stepper.finish))
    handles.append(optimizer.register_step_post_hook(stepper.stepped))

    def undo() -> None:
        whole_steps.join(optimizer)
        for handle in handles:
            handle.remove()

    return undo


def _update(stepper: "weakref.ref[_Stepper]", place: int, parameter: torch.Tensor) -> None:
    """Step for one parameter, unless its optimizer is gone."""
    found = stepper()
    if found is not None:
        found.update(place, parameter)


class _Stepper:
    """Lets the optimizer see one parameter at a time."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.step = bare_step(type(optimizer))
        self.updated: set[int] = set()
        self.first: list[dict[str, Any]] = []
        """The groups' numbers in the first backward that updates; its step compares them."""

    def update(self, place: int, parameter: torch.Tensor) -> None:
        """Step for one parameter and free its gradient."""
        if id(parameter) in self.updated:
            raise RuntimeError(ADDED_UP)
        if not self.first:
            defaults = self.optimizer.defaults
            self.first = [_numbers(group, defaults) for group in self.optimizer.param_groups]
        self.updated.add(id(parameter))
        tell(parameter)  # type: ignore[arg-type]
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        optimizer.param_groups = [{**groups[place], "params": [parameter]}]
        try:
            self.step(optimizer)
        finally:
            optimizer.param_groups = groups
        parameter.grad = None

    def finish(self, optimizer: Any, *_: Any) -> None:
        """Make what is left of a step: all of the first one, later on nothing."""
        groups = optimizer.param_groups
        if any(map(_differs, groups, self.first)):
            raise RuntimeError(SET_BETWEEN)
        self.first = [{} for _ in self.first]
        for group in groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    optimizer.param_groups = [{**group, "params": [parameter]}]
                    self.step(optimizer)
                    parameter.grad = None
        optimizer.param_groups = groups

    def stepped(self, *_: Any) -> None:
        """The next backward belongs to the next step."""
        self.updated.clear()


KOREAN = """
gradients are added up over several backwards, and optimizer_in_backward has used the first one up
already: take the technique out of the recipe
    여러 번의 backward에 걸쳐 그래디언트를 누적하는데 optimizer_in_backward가 첫 번째 것을 이미
    썼습니다. 레시피에서 이 기법을 빼세요
the loop sets its rate between backward and step, and optimizer_in_backward has updated by the one
before: take the technique out of the recipe
    루프가 backward와 step 사이에 학습률을 바꾸는데 optimizer_in_backward가 이미 이전 값으로
    갱신했습니다. 레시피에서 이 기법을 빼세요
{who} needs whole steps
    스텝이 통째로 필요합니다: {who}
{kind} may need all gradients at once: its step is not torch's own
    {kind}에는 모든 그래디언트가 한꺼번에 필요할 수 있습니다. step이 torch의 것이 아닙니다
there is another optimizer, whose backward may reach these parameters
    다른 옵티마이저가 있고, 그 backward가 이 파라미터에도 그래디언트를 만들 수 있습니다
gradients are averaged over processes, after backward made them
    backward 뒤에 프로세스들이 그래디언트를 평균합니다
GradScaler unscales all gradients before the step
    GradScaler가 스텝 전에 모든 그래디언트를 언스케일합니다
gradients are added up over several backwards ({n} before the step)
    여러 번의 backward에 걸쳐 그래디언트를 누적합니다(스텝 전에 {n}번)
rates are set between backward and step: updates in backward would have the old ones
    backward와 step 사이에 학습률을 바꾸므로, 역전파 안에서 갱신하면 이전 값을 쓰게 됩니다
the optimizer made a step or was loaded already
    옵티마이저가 이미 스텝을 했거나 불러온 것입니다
its parameters lie on several devices, and backward runs in a thread for each
    파라미터가 여러 디바이스에 있고, backward는 디바이스마다 다른 스레드에서 실행됩니다
the step has no gradients when it begins: it runs backward itself
    스텝이 시작될 때 그래디언트가 없습니다. 스텝 안에서 backward를 실행합니다
gradients are clipped, which needs all of them
    그래디언트를 클리핑하므로 모든 그래디언트가 필요합니다
gradients are read between backward and step, in {names}
    backward와 step 사이에 그래디언트를 읽습니다: {names}
"""
