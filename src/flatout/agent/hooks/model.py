"""The model hook point: the root modules, found when they are first called in training."""

import functools
import weakref
from collections import Counter
from collections.abc import Callable
from threading import get_ident
from typing import Any

from flatout.agent import patching
from flatout.agent.describe import describe, is_compiled
from flatout.agent.samples import is_rehearsed, leading_size
from flatout.agent.session import Session
from flatout.agent.training_device import follow
from flatout.records import phase_clock as phases
from flatout.records.technique import hook_points_of, name_of

NARROW_AFTER = 3
"""Steps of every optimizer after which discovery ends and only the roots' classes stay patched:
discovery costs 1.05x on a model of 600 modules, patched root classes cost nothing that was seen."""
SHAPES_FROM = 64
"""Steps whose input shapes are looked at."""
NARROW_ANYWAY = 20
"""Steps of any optimizer after which discovery ends even if another never stepped."""


def install(session: Session) -> None:
    """Find the roots and put the recipe around their training calls."""
    follow(session)
    _Roots(session).install()


INSIDE = frozenset({phases.FORWARD, phases.BACKWARD, phases.EVAL})
"""Phases in which a model call is no outermost one."""


def _note_compiler(module: Any, facts: dict[str, Any], name: str) -> None:
    """Note the technique that acted last, if the model is compiled now and was not before."""
    if not facts.get("is_compiled") and is_compiled(module):
        facts |= {"is_compiled": True, "compiled_by": name}


def _call_found(original: Callable[..., Any], root: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a module that a weak reference leads to: whoever calls it has it."""
    return original(root(), *args, **kwargs)


class _Roots:
    """The set of root modules, in order of their first training call."""

    def __init__(self, session: Session) -> None:
        import torch
        from torch.nn.utils import parametrize

        self.torch = torch
        self.session = session
        self.calls = session.training_calls
        self.numbers: dict[int, int] = {}
        self.inner: Counter[int] = Counter()
        """By its identity how many live roots a part belongs to."""
        self.shapes: dict[int, set[Any]] = {}
        self.weight_class = parametrize.ParametrizationList
        self.is_compiling = torch.compiler.is_compiling

    def install(self) -> None:
        self.discovery = patching.wrap(self.torch.nn.Module, "__call__", self._discovering)
        self.session.on("segment", self.narrow)

    def _discovering(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call of a module, in which roots are found."""
        session, is_compiling = self.session, self.is_compiling

        @functools.wraps(original)
        def discover(module: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or get_ident() != session.thread or session.clock.stack[-1] in INSIDE:
                return original(module, *args, **kwargs)
            return self.outermost(module, original, args, kwargs)

        return discover

    def outermost(
        self,
        module: Any,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a call that no other module's call encloses."""
        session = self.session
        has_graph = self.torch.is_grad_enabled() and not self.torch.is_inference_mode_enabled()
        is_training = has_graph and module.training
        if is_training and id(module) not in self.calls and not is_rehearsed((args, kwargs)):
            self.consider(module, original)
        if not is_training:
            session.note_tested()
        run = self.calls.get(id(module))
        if run is None:
            session.clock.push(phases.FORWARD if is_training else phases.EVAL)
            try:
                return original(module, *args, **kwargs)
            finally:
                session.clock.pop()
        if not is_training:
            session.segment.evals += 1
            if has_graph and self.numbers[id(module)] < len(session.model_facts):
                facts = session.model_facts[self.numbers[id(module)]]
                facts["eval_graph_calls"] = facts.get("eval_graph_calls", 0) + 1
            session.clock.push(phases.EVAL)
            try:
                return original(module, *args, **kwargs)
            finally:
                session.clock.pop()
                session.beat()
        return self.train(module, run, args, kwargs)

    def train(
        self, module: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a training call of a root through the recipe."""
        session = self.session
        segment = session.segment
        number = self.numbers[id(module)]
        segment.calls += [0] * (number + 1 - len(segment.calls))
        segment.calls[number] += 1
        if not (session.loaders or segment.batches) and number == 0:
            self.count_samples(args, kwargs)
        if session.is_recording and len(session.segments) < SHAPES_FROM:
            session.quietly(self.note_shapes)(number, args, kwargs)
        session.note_trained_batches()
        if session.listeners["forward"]:
            session.fire("forward", module, args, kwargs)
        session.clock.push(phases.FORWARD)
        try:
            output = run(*args, **kwargs)
        finally:
            session.clock.pop()
        if session.listeners["forward_end"]:
            session.fire("forward_end", module, output)
        return output

    def count_samples(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count what the first root is called with: without a loader that is the batch.

        A closure that the optimizer calls again is given the same one.
        """
        segment = self.session.segment
        if segment.closures > 1 and phases.OPTIMIZER in self.session.clock.stack:
            return
        sizes = map(leading_size, (*args, *kwargs.values()))
        segment.samples += next((size for size in sizes if size), 0)

    def note_shapes(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the distinct shapes that a root is called with."""
        shapes = self.shapes.setdefault(number, set())
        shapes.add(tuple(getattr(value, "shape", None) for value in (*args, *kwargs.values())))
        if number < len(self.session.model_facts):
            self.session.model_facts[number]["input_shapes"] = len(shapes)

    def consider(self, module: Any, original: Callable[..., Any]) -> None:
        """Make the module a root if it holds trained parameters and no root holds it.

        That leaves out criteria, frozen feature networks and averaged teachers; and what computes
        a weight of a layer, which is called by whoever reads the weight, at its building first. One
        whose parameters its first call makes is looked at again in the second.
        """
        if isinstance(module, self.weight_class):
            return
        if any(map(self.torch.nn.parameter.is_lazy, module.parameters())):
            return
        trainable = {id(p) for p in module.parameters() if p.requires_grad}
        optimizers = self.session.optimizers
        trained = {
            id(p) for o in optimizers for group in o.param_groups for p in group["params"]
        } or trainable
        if not trainable & trained or id(module) in self.inner:
            return
        session = self.session
        known = len(session.model_facts)
        session.note_root(module)
        facts = next(iter(session.model_facts[known:]), {})
        self.change(module, facts)
        inner = {id(m) for m in module.modules() if m is not module}
        self.inner.update(inner)
        call = self.bare_call(module, original)
        if session.touches("model") or session.touches("forward"):
            call = self.described(module, facts, call)
        self.calls[id(module)] = session.transform("forward", call, module)
        weakref.finalize(module, self.forget, id(module), inner)
        self.numbers[id(module)] = session.root_count
        session.add_root(module)
        session.fire("root", module)

    def bare_call(self, module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a root's own call, which keeps the root alive only where the session does."""
        if self.session.keeps_roots:
            return functools.partial(original, module)
        return functools.partial(_call_found, original, weakref.ref(module))

    def forget(self, root: int, inner: set[int]) -> None:
        """Forget a root that is gone: others may be given its and its parts' addresses."""
        self.calls.pop(root, None)
        self.inner -= Counter(inner)

    def change(self, module: Any, facts: dict[str, Any]) -> None:
        """Let the techniques change a root one after the other, and note which one compiled it."""
        session = self.session
        for technique in session.techniques:
            if "model" in hook_points_of(technique):
                session.transform("model", module, only=technique)
                session.quietly(_note_compiler)(module, facts, name_of(technique))

    def described(
        self, module: Any, facts: dict[str, Any], call: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return the innermost call, in whose first run the facts become those of the recipe.

        What comes next is chosen by them: a technique that is in force is not to be offered
        again, and one that it makes useless is not to be tried. Autocast shows inside of the
        call only.
        """
        root: Any = weakref.ref(module)
        describe_again = self.session.quietly(lambda: facts.update(describe(root())))

        def first(*args: Any, **kwargs: Any) -> Any:
            describe_again()
            return call(*args, **kwargs)

        return patching.at_first_call(call, first)

    def narrow(self, _: Any) -> None:
        """End the discovery: only the roots' own classes stay patched."""
        counts = self.session.counts
        is_over = min(counts.values()) >= NARROW_AFTER and (
            self.session.is_marked or self.session.knows_optimizers
        )
        if not (is_over or max(counts.values()) >= NARROW_ANYWAY):
            return
        self.session.off("segment", self.narrow)
        self.session.knows_roots = True
        self.discovery.undo()
        for kind in {type(root) for root in self.session.roots}:
            patching.wrap(kind, "__call__", self.listening)

    def listening(self, inherited: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call of a root's class, in which its training calls are found."""
        session, sampler = self.session, self.session.sampler
        is_compiling = self.is_compiling
        is_grad_enabled, is_tracing = (
            self.torch.is_grad_enabled,
            self.torch.compiler.is_dynamo_compiling,
        )

        calls = self.calls

        @functools.wraps(inherited)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            run = None if is_tracing() else calls.get(id(module))
            if run is None or get_ident() != session.thread or session.clock.stack[-1] in INSIDE:
                return inherited(module, *args, **kwargs)
            is_skipped = sampler.skips_left and module.training and is_grad_enabled()
            if is_skipped and session.loaders:
                return run(*args, **kwargs)
            if is_compiling():  # an export, which Dynamo knows nothing of
                return inherited(module, *args, **kwargs)
            return self.outermost(module, inherited, args, kwargs)

        return call
