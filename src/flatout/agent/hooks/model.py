"""The model hook point: the root modules, found when they are first called in training."""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

from flatout.agent import patching
from flatout.agent.describe import describe, is_compiled
from flatout.agent.hooks.compiled_functions import CompiledFunctions
from flatout.agent.samples import is_rehearsed, is_scalar, leading_size
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
    roots = Roots(session)
    roots.install()
    CompiledFunctions(roots).install()


def _note_compiler(module: Any, facts: dict[str, Any], name: str) -> None:
    """Note the technique that acted last, if the model is compiled now and was not before."""
    if not facts.get("is_compiled") and is_compiled(module):
        facts |= {"is_compiled": True, "compiled_by": name}


def _call_found(original: Callable[..., Any], root: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call a module that a weak reference leads to: whoever calls it has it."""
    return original(root(), *args, **kwargs)


def wrapped(module: Any) -> Iterator[Any]:
    """Yield a module and what it wraps: the model inside of DDP, or of averaged weights."""
    while module is not None:
        yield module
        children = list(module._modules.values())
        module = children[0] if len(children) == 1 else None


def kin_of(root: Any) -> Iterator[type]:
    """Yield the classes of a root and of what evaluations call in its place.

    Those are copies (averaged weights), the model inside a wrapper (of DDP, the uncompiled one),
    and large parts (an encoder). What is called inside a compiled part is left out: another
    `__call__` of its class would have it compiled again.
    """
    compiled = [m for m in root.modules() if _is_compiled(m)]
    bodies = [m._modules.get("_orig_mod", m) for m in compiled]
    barred = {type(part) for body in bodies for part in body.modules() if part is not body}
    found = list(wrapped(root))
    parts = [part for part in found[-1]._modules.values() if part is not None and part._modules]
    yield type(root)
    yield from (type(module) for module in (*found, *parts) if type(module) not in barred)


def has_own_call(kind: Any) -> bool:
    """Return whether a class has a `__call__` of the script's, which decides what torch's is given.

    Torch's own only pass calls on.
    """
    return not str(kind.__call__.__module__).startswith("torch.")


def _is_compiled(module: Any) -> bool:
    is_wrapped = "_orig_mod" in module._modules
    return is_wrapped or getattr(module, "_compiled_call_impl", None) is not None


class Roots:
    """The set of root modules, in order of their first training call."""

    def __init__(self, session: Session) -> None:
        import torch
        from torch.nn.utils import parametrize

        self.torch = torch
        self.session = session
        self.calls = session.training_calls
        self.numbers: dict[int, int] = {}
        self.known: list[tuple[tuple[type, int], Callable[[], Any]]] = []
        """Of each number class and count of parameters, and what leads to the module."""
        self.inner: Counter[int] = Counter()
        """By its identity how many live roots a part belongs to."""
        self.kin: dict[type, None] = {}
        """Classes that evaluations call, in the order in which they were found."""
        self.refused: dict[int, int] = {}
        """By its identity: how many optimizers there were when a module was no root."""
        self.trains_in_eval: set[int] = set()
        self.asked = 0
        """Identity of the module that was called last in evaluation mode with gradients on."""
        self.compiled: Callable[..., Any] | None = None
        """The compiled function that is called in the place of a root."""
        self.is_inside = False
        """Whether a root's training call runs in a skipped step, which the clock does not show."""
        self.shapes: dict[int, set[Any]] = {}
        self.weight_class = parametrize.ParametrizationList
        self.is_compiling = torch.compiler.is_compiling
        # A script may have methods of its own under torch's names, and batches of any kind.
        self.look_at = session.quietly(self.consider)
        self.count_samples = session.quietly(self._count_samples)

    def install(self) -> None:
        """Look at every module's call until the roots are known."""
        self.discovery = patching.wrap(self.torch.nn.Module, "__call__", self._discovering)
        self.session.on("stop", self.discovery.undo)
        self.session.on("segment", self.narrow)
        self.session.on("backward", self.saw_backward)

    def _discovering(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call of a module, in which roots are found."""
        session, is_compiling = self.session, self.is_compiling

        @functools.wraps(original)
        def discover(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or get_ident() != session.thread:
                return original(module, *args, **kwargs)
            if session.clock.stack[-1] in phases.OF_MODELS:
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
        has_graph = self.torch.is_grad_enabled() and not self.torch.is_inference_mode_enabled()
        is_training = has_graph and (module.training or id(module) in self.trains_in_eval)
        if not is_training:
            return self.evaluate(module, original, args, kwargs, has_graph=has_graph)
        if id(module) not in self.calls and self._may_train() and not is_rehearsed((args, kwargs)):
            self.look_at(module, original)
        run = self.calls.get(id(module))
        if run is not None:
            return self.train(module, run, args, kwargs)
        session = self.session
        session.clock.push(phases.FORWARD)
        try:
            return original(module, *args, **kwargs)
        finally:
            session.clock.pop()

    def _may_train(self) -> bool:
        """Return whether a call in training mode may be one of the training.

        Until there is an optimizer, and no step was made without any, it asks a model for a shape:
        as a rule a part of it, on the host, without the script's autocast.
        """
        return bool(self.session.optimizer_count or self.session.counts)

    def evaluate(
        self,
        module: Any,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        has_graph: bool,
    ) -> Any:
        """Run a call that trains nothing: an evaluation, a rollout, a teacher."""
        session = self.session
        session.note_tested()
        is_part = id(module) in self.inner
        session.segment.evals += is_part or any(type(one) in self.kin for one in wrapped(module))
        if has_graph:
            self.asked = id(module)
            number = self.numbers.get(id(module), len(session.model_facts))
            if number < len(session.model_facts):
                facts = session.model_facts[number]
                facts["eval_graph_calls"] = facts.get("eval_graph_calls", 0) + 1
                session.eval_graphs.append(facts)
        session.clock.push(phases.EVAL)
        try:
            return original(module, *args, **kwargs)
        finally:
            session.clock.pop()
            session.beat()

    def saw_backward(self, _: Any) -> None:
        """Take a model that was called in evaluation mode only, and goes backward, for training.

        Some models come in that mode, as those that transformers loads, and scripts leave them so.
        """
        if self.asked and self.asked not in self.calls and not self.session.segment.calls:
            self.trains_in_eval.add(self.asked)
        self.asked = 0

    def train(
        self, module: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a training call of a root through the recipe."""
        session = self.session
        segment = session.segment
        number = self.numbers[id(module)]
        segment.calls += [0] * (number + 1 - len(segment.calls))
        segment.calls[number] += 1
        if number == 0 and not segment.batches:
            self.count_samples(args, kwargs)
        if session.is_recording and len(session.segments) < SHAPES_FROM:
            session.quietly(self._note_shapes)(number, args, kwargs)
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

    def _count_samples(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count what the first root is called with: where none is drawn in a step, it is the batch.

        A closure that the optimizer calls again is given the same one.
        """
        segment = self.session.segment
        if segment.closures > 1 and phases.OPTIMIZER in self.session.clock.stack:
            return
        sizes = map(leading_size, sorted((*args, *kwargs.values()), key=is_scalar))
        size = next((size for size in sizes if size), 0)
        segment.called += size
        segment.called_most = max(segment.called_most, size)

    def _note_shapes(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the distinct shapes that a root is called with, and see whether under autocast.

        The first call of all may have been a look at its output.
        """
        shapes = self.shapes.setdefault(number, set())
        shapes.add(tuple(getattr(value, "shape", None) for value in (*args, *kwargs.values())))
        if number < len(self.session.model_facts):
            facts = self.session.model_facts[number]
            facts["input_shapes"] = len(shapes)
            facts["used_autocast"] |= self.torch.is_autocast_enabled(facts["device"])

    def consider(self, module: Any, original: Callable[..., Any]) -> None:
        """Make the module a root if it holds trained parameters and no root holds it.

        That leaves out criteria, frozen feature networks and averaged teachers; and what computes
        a weight of a layer, which is called by whoever reads the weight, at its building first. One
        whose parameters its first call makes is looked at again in the second.
        """
        session = self.session
        built = session.optimizer_count
        if isinstance(module, self.weight_class) or self.refused.get(id(module)) == built:
            return
        if any(map(self.torch.nn.parameter.is_lazy, module.parameters())):
            return
        trainable = {id(p) for p in module.parameters() if p.requires_grad}
        trained = {
            id(p) for o in session.optimizers for group in o.param_groups for p in group["params"]
        }
        if not trainable & (trained or trainable) or id(module) in self.inner:
            if session.knows_roots:
                self.refused[id(module)] = built
            return
        number = self._number_for(module, trained)
        facts = next(iter(session.model_facts[number : number + 1]), {})
        self.change(module, facts)
        inner = {id(m) for m in module.modules() if m is not module}
        self.inner.update(inner)
        call = self._bare_call(module, original)
        if session.touches("model") or session.touches("forward"):
            call = self.described(module, facts, call)
        self.calls[id(module)] = session.transform("forward", call, module)
        weakref.finalize(module, self.forget, id(module), inner)
        self.numbers[id(module)] = number
        session.quietly(lambda: self.kin.update(dict.fromkeys(kin_of(module))))()
        session.add_root(module, number)
        session.fire("root", module)

    def _number_for(self, module: Any, trained: set[int]) -> int:
        """Return a root's number: that of one that is over, which a script makes again for a fold.

        That one is of the same class and size. Live optimizers hold what is `trained`.
        """
        own = type(module), sum(parameter.numel() for parameter in module.parameters())
        for number, (known, find) in enumerate(self.known):
            if known == own and self._is_over(number, find(), trained):
                self.calls.pop(id(find()), None)  # it may go
                break
        else:
            number = len(self.known)
            self.session.note_root(module)
        self.known[number:] = [(own, weakref.ref(module)), *self.known[number + 1 :]]
        return number

    def _is_over(self, number: int, root: Any, trained: set[int]) -> bool:
        """Return whether a root trains no more."""
        if root is None:
            return True
        if trained:
            return not any(id(parameter) in trained for parameter in root.parameters())
        return self.session.knows_roots and not any(self.session.segment.calls[number : number + 1])

    def _bare_call(self, module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a root's own call, which keeps the root alive only where the session does."""
        if self.session.keeps_roots:
            return functools.partial(original, module)
        return functools.partial(_call_found, original, weakref.ref(module))

    def forget(self, root: int, inner: set[int]) -> None:
        """Forget a root that is gone: others may be given its and its parts' addresses."""
        self.calls.pop(root, None)
        self.numbers.pop(root, None)
        self.trains_in_eval.discard(root)
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
            if self.compiled is not None:
                facts["is_compiled"] = True
            return call(*args, **kwargs)

        return patching.at_first_call(call, first)

    def narrow(self, _: Any) -> None:
        """End the discovery: only the classes of the roots, and of their kin, stay patched.

        Where one has a call of its own, or the script has put another in the place of all modules',
        what comes out of that is listened to as before.
        """
        session, counts = self.session, self.session.counts
        is_over = min(counts.values()) >= NARROW_AFTER and (
            session.is_marked or session.knows_optimizers
        )
        if not (is_over or max(counts.values()) >= NARROW_ANYWAY):
            return
        session.off("segment", self.narrow)
        session.off("backward", self.saw_backward)
        session.knows_roots = True
        # The real run goes on to exports and the like, and no one asks there what it evaluates.
        kin = self.kin if session.is_recording else ()
        kinds = dict.fromkeys((*map(type, session.roots), *kin))
        is_covered = self.torch.nn.Module.__call__ is not self.discovery.put
        if is_covered or any(map(has_own_call, kinds)):
            return
        self.discovery.undo()
        for kind in kinds:
            session.on("stop", patching.wrap(kind, "__call__", self.listening).undo)

    def listening(self, inherited: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call of a class, in which the roots' calls and evaluations are found."""
        session, sampler = self.session, self.session.sampler
        is_grad_enabled, is_tracing = (
            self.torch.is_grad_enabled,
            self.torch.compiler.is_dynamo_compiling,
        )

        calls = self.calls

        @functools.wraps(inherited)
        def call(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            if is_tracing() or get_ident() != session.thread or self.is_inside:
                return inherited(module, *args, **kwargs)
            if session.clock.stack[-1] in phases.OF_MODELS:
                return inherited(module, *args, **kwargs)
            run = calls.get(id(module))
            if run is None or not (sampler.skips_left and module.training and is_grad_enabled()):
                return self.heard(module, inherited, args, kwargs)
            self.is_inside = True
            try:
                return run(*args, **kwargs)
            finally:
                self.is_inside = False

        return call

    def heard(
        self,
        module: Any,
        inherited: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a call of a root or one of its kin that no other call encloses."""
        # An export, which Dynamo knows nothing of; a part that backward computes again.
        if self.is_compiling() or self.torch._C._current_graph_task_id() != -1:
            return inherited(module, *args, **kwargs)
        return self.outermost(module, inherited, args, kwargs)
