"""Functions that the script compiles: one that computes the loss, one that steps the optimizer.

Dynamo runs what is in such a function without a model's call, by which the roots are found, and
without an optimizer's hooks. So the function's call takes the place of the root's, or of the step.
"""

import functools
import inspect
import itertools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING, Any

from flatout.agent import patching
from flatout.agent.step_sampler import nothing
from flatout.records import phase_clock as phases

if TYPE_CHECKING:
    from flatout.agent.hooks.model import Roots

DEPTH = 2
"""Functions of the script below the compiled one, and objects in objects, that are looked into."""
MOST = 100
"""Values of each that are looked at."""
DYNAMOS = "_torchdynamo_wrapper_id"
"""By it torch tells what it compiled from what only has its attributes."""
MOST_LOOKS = 20
"""Calls with gradients on, and an optimizer there, in which nothing was found."""


@dataclass(slots=True)
class _Compiled:
    """A compiled function, and what is known of it."""

    function: Any
    made: Callable[..., Any]
    """What torch made of it."""
    root: Callable[[], Any] = nothing
    """Leads to the first of the models in it that an optimizer trains."""
    optimizer: Callable[[], Any] = nothing
    """Leads to one that steps in it, and whose hooks are not called."""
    is_judged: bool = False
    """Whether it was seen what a call does."""
    looks: int = 0
    given: list[int] = field(default_factory=list)
    """Identities of the modules among its arguments."""


class CompiledFunctions:
    """What `torch.compile` makes of functions, with the roots that they call."""

    def __init__(self, roots: "Roots") -> None:
        import torch

        self.torch, self.roots, self.session = torch, roots, roots.session
        self.look = self.session.quietly(self._look)
        self.found: weakref.WeakSet[Any] = weakref.WeakSet()
        """The roots that compiled functions call."""

    def install(self) -> None:
        """Listen to the calls of functions that are compiled from now on."""
        patching.wrap(self.torch, "compile", self.listening)

    def listening(self, compile_it: Callable[..., Any]) -> Callable[..., Any]:
        """Return `torch.compile`; as a decorator it calls itself with the function."""

        @functools.wraps(compile_it)
        def compiling(model: Any = None, **options: Any) -> Any:
            made = compile_it(model, **options)
            is_function = callable(made) and not isinstance(made, self.torch.nn.Module | type)
            return self.heard(model, made) if is_function and model is not None else made

        return compiling

    def heard(self, function: Any, made: Callable[..., Any]) -> Callable[..., Any]:
        """Return a compiled function whose outermost calls in training are listened to."""
        session, roots = self.session, self.roots
        is_tracing = self.torch.compiler.is_dynamo_compiling
        found = _Compiled(function, made)

        @functools.wraps(made)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_tracing() or get_ident() != session.thread or roots.is_inside:
                return made(*args, **kwargs)
            if session.clock.stack[-1] in phases.OF_MODELS:
                return made(*args, **kwargs)
            return self.run(found, args, kwargs)

        if hasattr(made, DYNAMOS):
            call.__dict__[DYNAMOS] = id(call)
        return call

    def run(self, found: _Compiled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that no model's encloses."""
        given = [id(x) for x in args if isinstance(x, self.torch.nn.Module)]
        if given != found.given:  # another model than before, perhaps
            found.given, found.is_judged, found.looks = given, False, 0
        root = found.root()
        if not found.is_judged:
            self.look(found, args, kwargs)
            return self.judge(found, args, kwargs)
        optimizer, steps = found.optimizer(), self.session.steps
        is_skipped = self.session.sampler.skips_left
        if root is None and optimizer is not None and not is_skipped:
            steps.before(optimizer, (optimizer,), {})
        result = self.called(found, args, kwargs)
        if optimizer is not None and (root is None or is_skipped):
            steps.after(optimizer, (), {})
        elif optimizer is not None:
            self.end_step(optimizer)
        return result

    def called(self, found: _Compiled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function, as its root where it has one."""
        root = found.root()
        if root is None or id(root) not in self.roots.calls:
            return found.made(*args, **kwargs)
        return self.through(found.made, root, args, kwargs)

    def through(
        self,
        function: Callable[..., Any],
        root: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a compiled function as a call of its root."""
        session, roots = self.session, self.roots
        has_graph = self.torch.is_grad_enabled() and not self.torch.is_inference_mode_enabled()
        if not (has_graph and (root.training or id(root) in roots.trains_in_eval)):

            def call(_root: Any, /, *given: Any, **named: Any) -> Any:
                return function(*given, **named)

            return roots.evaluate(root, call, args, kwargs, has_graph=has_graph)
        run, before = roots.calls[id(root)], roots.compiled
        roots.compiled, roots.is_inside = function, bool(session.sampler.skips_left)
        try:
            if roots.is_inside:
                return run(*args, **kwargs)
            return roots.train(root, run, args, kwargs)
        finally:
            roots.compiled, roots.is_inside = before, False

    def add(self, module: Any) -> None:
        """Make a module a root that a compiled function calls, and note that it is compiled."""
        roots = self.roots
        if id(module) in roots.calls:
            return
        roots.consider(module, self._call_or_function)
        if id(module) in roots.calls:
            self.found.add(module)
            self.session.model_facts[roots.numbers[id(module)]]["is_compiled"] = True

    def _call_or_function(self, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a root that a compiled function calls, or that function in its place."""
        if self.roots.compiled is not None:
            return self.roots.compiled(*args, **kwargs)
        return type(module).__call__(module, *args, **kwargs)

    def judge(self, found: _Compiled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call and see what it does.

        One that leaves nothing to go backward from and changes no weights trains nothing, such as
        clipping. One after which weights are others, while no step was heard, holds a step.
        """
        session, root, optimizer = self.session, found.root(), found.optimizer()
        if root is None and optimizer is None:
            return found.made(*args, **kwargs)
        backwards, steps = session.segment.backwards, session.counts.copy()
        versions = _versions(optimizer)
        result = self.called(found, args, kwargs)
        has_stepped = _versions(optimizer) != versions and session.counts == steps
        went_back = session.segment.backwards != backwards or self.has_graph(result)
        if root is None or root.training or id(root) in self.roots.trains_in_eval:
            found.is_judged = True
            found.optimizer = found.optimizer if has_stepped else nothing
            found.root = found.root if went_back or has_stepped else nothing
        if has_stepped:
            self.end_step(optimizer)
        return result

    def end_step(self, optimizer: Any) -> None:
        """End a step of which nothing was heard."""
        session = self.session
        session.segment.backwards = max(1, session.segment.backwards)
        if not session.is_marked:
            session.end_segment(session.steps.prepare(optimizer))

    def has_graph(self, result: Any) -> bool:
        """Return whether a backward may begin at what a function returned."""
        leaves = self.torch.utils._pytree.tree_leaves(result)
        return any(isinstance(x, self.torch.Tensor) and x.requires_grad for x in leaves)

    def _look(self, found: _Compiled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find the models that a function may call and an optimizer trains, and its optimizer.

        Such models become roots. Nothing is looked for where gradients are off, or without an
        optimizer.
        """
        optimizers = self.session.optimizers
        if not (optimizers and self.torch.is_grad_enabled()):
            return
        found.looks += 1
        found.is_judged = found.looks > MOST_LOOKS
        held = (group["params"] for one in optimizers for group in one.param_groups)
        trained = {id(parameter) for parameters in held for parameter in parameters}
        reached = {
            id(x): x for x in self.parts_of([found.function, *args, *kwargs.values()], DEPTH)
        }
        models = [
            x
            for x in reached.values()
            if isinstance(x, self.torch.nn.Module) and any(id(p) in trained for p in x.parameters())
        ]
        inner = {id(part) for model in models for part in model.modules() if part is not model}
        for model in models:
            if id(model) not in inner:
                self.add(model)
        own = (weakref.ref(model) for model in models if model in self.found)
        found.root = next(own, nothing)
        known = (weakref.ref(one) for one in optimizers if id(one) in reached)
        found.optimizer = next(known, nothing)

    def parts_of(self, values: Iterable[Any], depth: int) -> Iterator[Any]:
        """Yield the modules and optimizers that values are, or that they hold."""
        for value in values:
            if isinstance(value, self.torch.nn.Module | self.torch.optim.Optimizer):
                yield value
            elif depth >= 0:
                yield from self.parts_of(_held_by(value), depth - 1)


def _versions(optimizer: Any) -> list[int]:
    """Return how often each weight of an optimizer was changed in place."""
    groups = [] if optimizer is None else optimizer.param_groups
    return [parameter._version for group in groups for parameter in group["params"]]


def _held_by(value: Any) -> Iterable[Any]:
    """Return what a function or an object refers to; nothing of torch's own, and of classes."""
    held: Iterable[Any] = ()
    if isinstance(value, functools.partial):
        held = [value.func, *value.args, *value.keywords.values()]
    elif inspect.ismethod(value):
        held = [value.__self__, value.__func__]
    elif inspect.isfunction(value):
        value = inspect.unwrap(value)
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        names = value.__code__.co_names
        held = [*cells, *(value.__globals__[x] for x in names if x in value.__globals__)]
    elif isinstance(value, list | tuple | dict):
        held = value.values() if isinstance(value, dict) else value
    elif not isinstance(value, type | types.ModuleType):
        of_torch = str(type(value).__module__).partition(".")[0] in ("torch", "builtins")
        held = () if of_torch else getattr(value, "__dict__", {}).values()
    return itertools.islice(held, MOST)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # the name has no value yet
        return False
