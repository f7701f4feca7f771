"""Update the hidden weight matrices with Muon, everything else as before.

What it does: takes the weights of linear layers out of each Adam step and updates them with
`torch.optim.Muon` at the same learning rate and weight decay; embeddings, the output layer, norms
and biases stay with Adam.
When it helps: transformers that train from scratch: fewer steps to the same loss.
What it costs: some matrix products per step; another training, whose rate wants tuning.
How it is checked: it changes the training on purpose, so losses are looked at for damage only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from flatout.agent.hooks import optimizer as loaded_parts
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, Technique

if TYPE_CHECKING:
    import torch

MIN_BLOCKS = 2
"""Without repeated blocks there are hardly any hidden matrices."""
STATE_KEY = "flatout_muon"
"""Where a checkpoint of the optimizer keeps Muon's part; plain Adam ignores it."""
COST = 0.02
"""Share of the step that Muon adds: below 2 % for GPT-2 124M (modded-nanogpt, published)."""
ADAM = ("Adam", "AdamW")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Muon(Technique):
    """Update hidden weight matrices with Muon."""

    family: ClassVar[str] = "optimizer"
    excludes_family: ClassVar[bool] = True
    addresses: ClassVar[frozenset[str]] = frozenset({"optimizer"})
    numerics: ClassVar[Numerics] = Numerics.TRAINING
    by_hand: ClassVar[str] = """
Two optimizers; step both:
+ muon = torch.optim.Muon(hidden_matrices, lr=lr, adjust_lr_fn="match_rms_adamw")
+ adamw = torch.optim.AdamW(everything_else, lr=lr)
"""

    momentum: float = 0.95

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum} must be at least 0 and below 1")

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["Muon"]:
        """Return the technique for models of repeated blocks that Adam trains."""
        del machine
        has_blocks = any(model.repeated_blocks >= MIN_BLOCKS for model in profile.models)
        has_adam = any(facts.name in ADAM for facts in profile.optimizers)
        return [cls()] if has_blocks and has_adam else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect a slower step: what Muon saves is steps, which no short trial shows."""
        del machine
        return Effect(
            step_ms=COST * profile.step_ms.median,
            peak_bytes=-sum(model.parameter_bytes for model in profile.models) // 2,
            why="fewer steps to the same loss, none of them faster; one state in place of two",
        )

    def model(self, root: Any) -> Any:
        """Remember which weights are hidden matrices."""
        found = hidden_matrices(root)
        if not found:
            raise NotApplicable("the model has no linear layers before its last one")
        _HIDDEN.update({id(weight): weight for weight in found})
        return root

    def optimizer(self, optimizer: Any) -> Any:
        """Take the hidden matrices out of this Adam's steps."""
        from flatout.agent import optimizer_swap
        from flatout.agent import optimizer_swap as whole_steps

        chosen = [p for g in optimizer.param_groups for p in g["params"] if id(p) in _HIDDEN]
        reason = find_obstacle(optimizer, chosen)
        if reason is not None:
            raise NotApplicable(reason)
        whole_steps.need(optimizer, "muon, which shares each step with it,")
        optimizer_swap.share(optimizer)
        step_with_muon(optimizer, chosen, momentum=self.momentum)
        return optimizer


_HIDDEN: "dict[int, torch.Tensor]" = {}
"""The hidden matrices of this process's roots by their identity, kept so that it stays theirs."""


def hidden_matrices(model: "torch.nn.Module") -> "list[torch.Tensor]":
    """Return the weights of all linear layers but the last, without those that embeddings share."""
    from torch import nn

    shared = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    weights = {id(m.weight): m.weight for m in linear[:-1]}
    return [w for key, w in weights.items() if key not in shared and w.requires_grad]


def find_obstacle(
    optimizer: "torch.optim.Optimizer", chosen: "Sequence[torch.Tensor]"
) -> str | None:
    """Return why Muon cannot take over these parameters of an optimizer, or None."""
    import torch

    obstacles = {
        "this torch has no torch.optim.Muon": not hasattr(torch.optim, "Muon"),
        f"its rates are no Adam's but {type(optimizer).__name__}'s": (
            type(optimizer).__name__ not in ADAM
        ),
        "it holds no hidden matrices of the model": not chosen,
        "the script maximises, which Muon cannot": any(
            group.get("maximize") for group in optimizer.param_groups
        ),
        "it made a step or was loaded already": _has_begun(optimizer, chosen),
        "sharded matrices cannot be orthogonalised": any(hasattr(p, "to_local") for p in chosen),
    }
    return next((why for why, is_true in obstacles.items() if is_true), None)


def _has_begun(optimizer: "torch.optim.Optimizer", chosen: "Sequence[torch.Tensor]") -> bool:
    """Return whether an optimizer goes on from a state that Muon did not share."""
    if not optimizer.state:
        return False
    is_without_part = loaded_parts.find(optimizer, STATE_KEY) is None
    return is_without_part or any(optimizer.state.get(p) for p in chosen)


def step_with_muon(
    optimizer: "torch.optim.Optimizer",
    matrices: "Sequence[torch.Tensor]",
    *,
    momentum: float = 0.95,
) -> "torch.optim.Optimizer":
    """Let Muon update some 2-d parameters in each step of an optimizer that holds them.

    The optimizer stays the script's one object: its groups, schedules and `zero_grad` go on, and
    Muon's rate and decay follow the group of each matrix. Its `state_dict` carries Muon's part;
    load one after this call.
    """
    _Beside(optimizer, matrices, momentum)
    return optimizer


class _Beside:
    """Muon's part of another optimizer's steps."""

    def __init__(
        self,
        optimizer: "torch.optim.Optimizer",
        matrices: "Sequence[torch.Tensor]",
        momentum: float,
    ) -> None:
        import torch

        self.chosen = {id(p) for p in matrices}
        parts = [[p for p in g["params"] if self.is_ours(p)] for g in optimizer.param_groups]
        self.places = [place for place, part in enumerate(parts) if part]
        self.muon: Any = torch.optim.Muon(
            [{"params": parts[place]} for place in self.places],
            momentum=momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        self.whole: list[list[Any]] = []
        self.has_closure = False
        # What the script loaded before the techniques came.
        part = loaded_parts.find(optimizer, STATE_KEY)
        if part is not None:
            self.muon.load_state_dict(part)
            self.keep_precision(part)
        optimizer.register_step_pre_hook(self.hide)
        optimizer.register_step_post_hook(self.take_over)
        optimizer.register_state_dict_post_hook(self.save)
        optimizer.register_load_state_dict_pre_hook(self.load)

    def keep_precision(self, part: dict[str, Any]) -> None:
        """Let what was loaded be as precise as it was saved: torch casts it as the weights are."""
        parameters = [p for group in self.muon.param_groups for p in group["params"]]
        for number, state in part["state"].items():
            matrix = parameters[number]
            for name, value in state.items():
                self.muon.state[matrix][name] = value.to(matrix.device)

    def is_ours(self, parameter: "torch.Tensor") -> bool:
        """Return whether Muon updates a parameter."""
        return id(parameter) in self.chosen

    def hide(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Take the matrices out of the groups for the length of a step."""
        self.has_closure = any(callable(value) for value in (*args, *kwargs.values()))
        self.whole = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if not self.is_ours(p)]

    def take_over(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Put the matrices back and update them, at the rate that their groups have now."""
        for group, parameters in zip(optimizer.param_groups, self.whole, strict=True):
            group["params"] = parameters
        for group, place in zip(self.muon.param_groups, self.places, strict=True):
            source = optimizer.param_groups[place]
            group["lr"], group["weight_decay"] = float(source["lr"]), source["weight_decay"]
        if may_step(optimizer, self.muon):
            self.muon.step()
        if self.has_closure:
            self.muon.zero_grad()  # the closure could not: it ran while they were hidden

    def save(self, _: Any, state: dict[str, Any]) -> dict[str, Any]:
        """Put Muon's part into a checkpoint, where a plain Adam passes over it."""
        return {**state, STATE_KEY: self.muon.state_dict()}

    def load(self, _: Any, state: dict[str, Any]) -> None:
        """Take Muon's part out of a checkpoint that has one."""
        if STATE_KEY in state:
            self.muon.load_state_dict(state[STATE_KEY])


def may_step(optimizer: "torch.optim.Optimizer", beside: "torch.optim.Optimizer") -> bool:
    """Do GradScaler's part for what steps alongside an optimizer that does it on its own.

    To a fused one the scaler leaves the unscaling of gradients, and steps with infinite ones. It
    sets `found_inf`, and `grad_scale` where the script did not unscale, while such a step runs.

    Returns:
        Whether all gradients are finite, as they are wherever the scaler steps any other optimizer.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is not None and float(found_inf):
        return False
    scale: Any = getattr(optimizer, "grad_scale", None)
    parameters = (p for group in beside.param_groups for p in group["params"])
    for gradient in (p.grad for p in parameters if scale is not None and p.grad is not None):
        gradient.mul_(scale.double().reciprocal().to(gradient))
    return True
