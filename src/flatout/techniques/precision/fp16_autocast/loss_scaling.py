"""Losses times a power of two, so that fp16 keeps small gradients, which come back plain."""

import functools
import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from flatout.agent import patching
from flatout.agent.training_device import live_optimizers

if TYPE_CHECKING:
    import torch

DEFAULT_SCALE = 2**13
"""Eight times below GradScaler's first scale, which loses the first steps of many trainings."""
GROWTH_INTERVAL = 2000
"""Steps without overflow after which the scale doubles: GradScaler's."""
MAX_SCALE = 2.0**24
"""Beyond it, the smallest gradients of fp16 are kept anyway."""


class LossScaling:
    """Scales losses at `backward` so that the script sees plain gradients and finite updates only.

    Unlike `torch.amp.GradScaler`, which a script has to call in five places, it unscales as soon as
    a backward has ended: clipping, logging and accumulation see the gradients they expect.
    """

    def __init__(self, scale: float = DEFAULT_SCALE, later: list[Any] | None = None) -> None:
        self.scale = float(scale)
        self.later: list[Any] = [] if later is None else later
        """Weak references to models that the next backward may be the first one of."""
        self.skipped = 0
        """Steps that changed nothing because their gradients had overflowed."""
        self.is_given_up = False
        """Whether they did at a scale of 1: the training goes on in fp32."""
        self._leaves: dict[int, weakref.ref[torch.Tensor]] = {}
        self._walks = 0
        self._groups: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        """By optimizer how many groups it had in the last backward."""
        self._flags: dict[torch.device, torch.Tensor] = {}
        self._aside: list[tuple[torch.Tensor, torch.Tensor]] = []
        """What a step that is skipped must not see."""
        self._is_spent = True
        self._depth = 0
        self._clean_steps = 0
        self._held: weakref.WeakKeyDictionary[Any, tuple[int, bool]] = weakref.WeakKeyDictionary()
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def install(
        self, backward: Callable[..., Any], roots: "Iterable[torch.nn.Module]" = ()
    ) -> Callable[..., Any]:
        """Watch all optimizers and schedulers; return what to run in place of the backward."""
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        self._know(p for root in roots for p in root.parameters())
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        for kind in _scheduler_kinds():
            patching.wrap(kind, "step", self._holding, order=patching.Order.TECHNIQUE)
        return self.around(backward)

    def around(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the backward with its losses scaled and its gradients unscaled."""
        signature = inspect.signature(backward)

        @functools.wraps(backward)
        def scaled(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            # The gradients of one that creates a graph are differentiated again.
            if given.arguments.get("create_graph") or self.is_given_up:
                return backward(*args, **kwargs)
            tensors = given.arguments["tensors"]
            many = (tensors,) if hasattr(tensors, "grad_fn") else tuple(tensors)
            self._begin(many)
            given.arguments["tensors"] = many
            given.arguments["grad_tensors"] = self._seeds(many, given.arguments)
            try:
                return backward(*given.args, **given.kwargs)
            finally:
                self._unscale()

        return scaled

    def _begin(self, tensors: "tuple[torch.Tensor, ...]") -> None:
        import torch

        if self._is_spent:
            self._flags = {}
            self._is_spent = False
        for gradients in _grouped(self._parameters()).values():
            # Exact, as the scale is a power of two: what was accumulated before joins the scaled.
            torch._foreach_mul_(gradients, self.scale)
        # After that: what is met only now got its gradients, if any, from scaled losses.
        while self.later:
            root = self.later.pop()()
            self._know(() if root is None else root.parameters())
        if self._has_new_groups():
            self._walks = 0
        if self._walks < MAX_WALKS:
            self._walks += 1
            self._know(leaves_of(tensors))

    def _seeds(self, tensors: "tuple[torch.Tensor, ...]", given: dict[str, Any]) -> list[Any]:
        import torch

        seeds = given.get("grad_tensors")
        if seeds is None:
            return [torch.full_like(tensor, self.scale) for tensor in tensors]
        many = [seeds] if isinstance(seeds, torch.Tensor) else list(seeds)
        return [
            torch.full_like(tensor, self.scale) if seed is None else seed * self.scale
            for tensor, seed in zip(tensors, many, strict=True)
        ]

    def _unscale(self) -> None:
        self._unscale_those(self._parameters())
        if self._depth and self._has_overflown():
            # A closure inside a step: its optimizer reads the gradients next.
            _drop(self._parameters())

    def _unscale_those(self, parameters: "Iterable[torch.Tensor]") -> None:
        import torch

        for (device, _), gradients in _grouped(parameters).items():
            if device not in self._flags:
                self._flags[device] = torch.zeros((), device=device)
            inverse = torch.full((), 1 / self.scale, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(
                gradients, self._flags[device], inverse
            )

    def _has_overflown(self) -> bool:
        return any(bool(flag.item()) for flag in self._flags.values())

    def _before_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._depth += 1
        if self._depth > 1 or self.is_given_up:
            return
        own = [p for group in optimizer.param_groups for p in group["params"]]
        unknown = [p for p in own if p.grad is not None and not self._knows(p)]
        if unknown:
            self._unscale_those(unknown)
            self._know(unknown)
        is_skipped = self._has_overflown()
        if is_skipped:
            self._aside = [(p, p.grad) for p in own if p.grad is not None]
            _drop(own)
        if not self._is_spent:
            self._adapt(is_skipped=is_skipped)
        self._is_spent = True
        steps = self._held.get(optimizer, (0, False))[0]
        self._held[optimizer] = steps + 1, is_skipped

    def _after_step(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if not self._depth:
            # A script may look at them, or fill them with zeros itself.
            for parameter, gradient in self._aside:
                parameter.grad = gradient.zero_()
            self._aside = []

    def _adapt(self, *, is_skipped: bool) -> None:
        if is_skipped:
            self.skipped += 1
            self.is_given_up = self.scale <= 1
            self.scale, self._clean_steps = max(1.0, self.scale / 2), 0
            return
        self._clean_steps += 1
        if self._clean_steps >= GROWTH_INTERVAL:
            self.scale, self._clean_steps = min(MAX_SCALE, 2 * self.scale), 0

    def _has_new_groups(self) -> bool:
        """Return whether an optimizer was given parameters.

        Maybe a model's that no walk has met.
        """
        live = {optimizer: len(optimizer.param_groups) for optimizer in live_optimizers()}
        is_new = any(self._groups.get(optimizer) != count for optimizer, count in live.items())
        self._groups.update(live)
        return is_new

    def _holding(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a scheduler's step that does nothing after a step that was skipped.

        Only for a scheduler that steps after every optimizer step: one that steps once an epoch
        goes on whatever the epoch's last step was.
        """

        @functools.wraps(step)
        def hold(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            optimizer = getattr(scheduler, "optimizer", None)
            known = self._held.get(optimizer) if optimizer is not None else None
            steps, is_skipped = known or (0, False)
            since, self._seen[scheduler] = steps - self._seen.get(scheduler, 0), steps
            return None if is_skipped and since == 1 else step(scheduler, *args, **kwargs)

        return hold

    def _know(self, leaves: "Iterable[torch.Tensor]") -> None:
        self._leaves |= {id(p): weakref.ref(p) for p in leaves if p.requires_grad}

    def _knows(self, parameter: "torch.Tensor") -> bool:
        reference = self._leaves.get(id(parameter))
        # What is gone leaves its address to others.
        return reference is not None and reference() is parameter

    def _parameters(self) -> "Iterator[torch.Tensor]":
        return (p for reference in self._leaves.values() if (p := reference()) is not None)


MAX_WALKS = 3
"""Backwards whose graph is searched for leaves outside the model, again whenever an optimizer is
given parameters; a later one is met at its optimizer's step."""


def leaves_of(tensors: "Iterable[torch.Tensor]") -> "Iterator[torch.Tensor]":
    """Yield the leaf tensors that a backward from these tensors accumulates gradients into."""
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [following for following, _ in node.next_functions if following is not None]


def _grouped(
    parameters: "Iterable[torch.Tensor]",
) -> "dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]":
    """Return the gradients by device and dtype; of sparse ones the values."""
    groups = defaultdict(list)
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or not gradient.is_floating_point():
            continue
        if gradient.is_sparse:
            parameter.grad = gradient = gradient.coalesce()
            gradient = gradient._values()
        groups[gradient.device, gradient.dtype].append(gradient)
    return groups


def _drop(parameters: "Iterable[torch.Tensor]") -> None:
    """Take the gradients away: every optimizer of torch leaves such parameters as they are."""
    for parameter in parameters:
        parameter.grad = None


def _scheduler_kinds() -> list[Any]:
    from torch.optim import lr_scheduler

    base = lr_scheduler.LRScheduler
    own = [k for k in vars(lr_scheduler).values() if isinstance(k, type) and issubclass(k, base)]
    return [kind for kind in {*own} if "step" in vars(kind)]
