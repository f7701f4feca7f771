"""Train low-rank adapters of the linear layers instead of the layers.

What it does: freezes the model, puts a LoRA adapter of peft next to each linear layer but the
last, and gives the script's optimizer the adapters' parameters in place of the model's.
When it helps: fine-tuning a large pretrained model: no weight gradients, hardly any states.
What it costs: another training with fewer degrees of freedom; checkpoints with other keys.
How it is checked: it changes the training on purpose, so losses are looked at for damage only.
"""

import contextlib
import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, final

from flatout.agent.training_device import live_optimizers
from flatout.analysis.stream_changes import resized
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.memory_stream import Allocation, Component, Draft, MemoryStream, Phase
from flatout.records.profile import Profile
from flatout.records.technique import Effect, MemoryOption, Numerics, Technique, process_state
from flatout.techniques.memory_pressure import activation_bytes, parameter_bytes, state_bytes

if TYPE_CHECKING:
    import torch

INSTALL = "lora needs peft: pip install 'flatout[lora]'"
MIN_PARAMETERS = 10_000_000
"""Below it, adapters save less than they add: an assumption."""
WEIGHT_GRADIENT_SHARE = 0.5
"""Share of the backward pass that is products for weight gradients: one of two for each layer."""
OWN_BYTES = 100 * 10**6
"""peft and what it imports, in the process's own memory (measured)."""
LINEAR = ("Linear", "Conv1D")
"""Layers by class name; the second is that of GPT-2 in transformers."""
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")
RANK = 16
"""The default of its authors' larger models, and of peft's examples."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Lora(Technique):
    """Train low-rank adapters."""

    addresses: ClassVar[frozenset[str]] = frozenset({"backward", "optimizer"})
    numerics: ClassVar[Numerics] = Numerics.TRAINING
    moves_random_stream: ClassVar[bool] = True
    extra: ClassVar[str] = "lora"
    by_hand: ClassVar[str] = """
After the model is made, before the optimizer:
+ config = peft.LoraConfig(r=$rank, lora_alpha=$alpha, target_modules="all-linear")
+ model = peft.get_peft_model(model, config)
"""

    rank: int = 16
    alpha: int = 32
    """Scale of the adapters' output, divided by the rank."""
    adapted: "Adapted" = process_state(dict)
    """What was adapted in this process."""
    training: "weakref.WeakSet[torch.optim.Optimizer]" = process_state(weakref.WeakSet)
    """Optimizers that were given adapters when a model got them."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank={self.rank} must be at least 1")

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["Lora"]:
        """Return the technique for large models of repeated blocks."""
        is_large = any(
            model.parameters >= MIN_PARAMETERS and model.repeated_blocks for model in profile.models
        )
        return [cls()] if is_large else ()

    @classmethod
    def memory_options(cls) -> Sequence[MemoryOption]:
        """Return what it makes of a traced step."""
        return [
            MemoryOption(
                settings={"rank": RANK},
                why="only thin matrices are trained; another training",
                change=functools.partial(low_rank, rank=RANK),
            )
        ]

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect the weight gradients and most of the optimizer to be gone."""
        step_ms = profile.step_ms.median
        own_bytes = OWN_BYTES if profile.device_kind == "cpu" else 0
        saved_ms = step_ms * profile.share("backward") * WEIGHT_GRADIENT_SHARE
        saved_ms += 0.9 * step_ms * profile.share("optimizer")
        # While activations are at their highest there are no gradients yet: those are saved only
        # where they are more than the activations.
        gradients = max(0, parameter_bytes(profile) - activation_bytes(profile))
        return Effect(
            step_ms=-min(saved_ms, 0.9 * step_ms),
            peak_bytes=own_bytes - state_bytes(profile) - gradients,
            why="no gradients and states for the weights, adapters in their place",
        )

    def model(self, root: Any) -> Any:
        """Freeze the root and put adapters into it."""
        found = add_adapters(root, rank=self.rank, alpha=self.alpha)
        for number, (weight, adapters) in found.items():
            # Not the weight itself: a script may let one model go before it makes the next.
            gone = functools.partial(_forget, self.adapted, number)
            self.adapted[number] = weakref.ref(weight, gone), adapters
        # Before the first backward already: GradScaler looks for gradients of what is held then.
        for optimizer in live_optimizers():
            with contextlib.suppress(NotApplicable):
                train_only(optimizer, self.adapted)
                self.training.add(optimizer)
        return root

    def optimizer(self, optimizer: Any) -> Any:
        """Give the optimizer the adapters of the model whose parameters it holds."""
        if not self.adapted:
            raise NotApplicable("no model got adapters before the first step")
        if optimizer not in self.training:
            train_only(optimizer, self.adapted)
        return optimizer


Adapted = dict[int, tuple[Any, list[Any]]]
"""By its identity each frozen weight, kept or followed so that it stays its own, and its layer's
adapters."""


def _forget(adapted: Adapted, number: int, _gone: Any) -> None:
    adapted.pop(number, None)


def add_adapters(model: "torch.nn.Module", *, rank: int = 16, alpha: int = 32) -> Adapted:
    """Freeze a model and put LoRA adapters into it, in place.

    Returns:
        What `train_only` wants.

    Raises:
        NotApplicable: if peft is missing or there is nothing to adapt; the model is as it was.
    """
    if type(model).__name__ in WRAPPERS:
        raise NotApplicable(f"{type(model).__name__} knows its parameters already")
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise NotApplicable(INSTALL) from None
    if _adapted_layers(model):
        raise NotApplicable("the script put adapters into the model itself")
    layers = _trained_layers(model)
    before = [p for p in model.parameters() if p.requires_grad]
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=layers)
    inject_adapter_in_model(config, model)
    for parameter in before:
        parameter.requires_grad = False
    adapters = _adapters_by_weight(model)
    for weight, of_layer in adapters.values():
        for adapter in of_layer:
            adapter.data = adapter.data.to(weight.device)
    for layer in _adapted_layers(model):
        layer.register_load_state_dict_pre_hook(_begin_again)
    _leave_fast_path(model)
    frozen: Adapted = {id(p): (p, []) for p in before}
    return frozen | adapters


def _trained_layers(model: "torch.nn.Module") -> list[str]:
    """Return the names of the linear layers but the last whose weights the script trains.

    What it froze it does not want trained, and no optimizer holds it.
    """
    named: list[tuple[str, Any]] = list(model.named_modules())
    linear = [(name, module) for name, module in named if type(module).__name__ in LINEAR]
    names = [name for name, module in linear[:-1] if module.weight.requires_grad]
    if not names:
        raise NotApplicable("the model has no linear layers before its last one that are trained")
    return names


def _leave_fast_path(model: "torch.nn.Module") -> None:
    """Have torch's encoder layers call their adapted layers in evaluations too.

    Without gradients they hand the layers' weights to one kernel, which knows no adapters.
    """
    import torch

    layers = (m for m in model.modules() if isinstance(m, torch.nn.TransformerEncoderLayer))
    if any(hasattr(part, "lora_A") for layer in layers for part in layer.modules()):
        torch.backends.mha.set_fastpath_enabled(value=False)


def _adapted_layers(model: "torch.nn.Module") -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def _begin_again(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Load a layer's state from before its adapters, as for another fold: they begin again, too."""
    plain = [name for name in ("weight", "bias") if prefix + name in state]
    for name in plain:
        state[f"{prefix}base_layer.{name}"] = state.pop(prefix + name)
    if plain:
        layer.reset_lora_parameters("default", init_lora_weights=True)
        for name, value in layer.state_dict(prefix=prefix).items():
            state.setdefault(name, value)


def _adapters_by_weight(model: "torch.nn.Module") -> Adapted:
    """Return what `Adapted` holds of the layers that got adapters; some may share a weight."""
    found: Adapted = {}
    for layer in _adapted_layers(model):
        weight = layer.base_layer.weight
        _, adapters = found.setdefault(id(weight), (weight, []))
        adapters += [p for p in layer.parameters() if p.requires_grad]
    return found


def train_only(optimizer: "torch.optim.Optimizer", adapted: Adapted) -> "torch.optim.Optimizer":
    """Put adapters in place of the frozen weights that an optimizer holds; groups stay.

    Each adapter goes into the group of its layer's weight: its rate is the one meant for the layer.
    An optimizer that was built on the adapted model has them already.

    Raises:
        NotApplicable: if it holds no weight that has adapters.
    """
    held = [p for g in optimizer.param_groups for p in g["params"] if id(p) in adapted]
    if not any(adapted[id(p)][1] for p in held):
        raise NotApplicable("this optimizer holds no weight of a layer with adapters")
    others = {id(p) for g in optimizer.param_groups for p in g["params"]} - adapted.keys()
    for group in optimizer.param_groups:
        new = [a for p in group["params"] for a in adapted.get(id(p), (p, []))[1]]
        group["params"] = [p for p in group["params"] if id(p) not in adapted]
        group["params"] += [adapter for adapter in new if id(adapter) not in others]
    for parameter in held:
        optimizer.state.pop(parameter, None)
        parameter.grad = None
    return optimizer


def low_rank(stream: MemoryStream, rank: int) -> MemoryStream:
    """LoRA: gradients and optimizer state of two thin matrices alongside each frozen one.

    Vectors stay frozen. Activations are kept as they are, which is an upper bound.
    """

    def size(allocation: Allocation) -> int:
        if len(allocation.shape) < 2:
            return 0
        rows, columns = allocation.shape[0], prod(allocation.shape[1:])
        itemsize = allocation.size // max(1, rows * columns)
        return min(allocation.size, rank * (rows + columns) * max(1, itemsize))

    smaller = resized(stream, Component.GRADIENTS, size)
    smaller = resized(smaller, Component.OPTIMIZER, size)
    draft = Draft(smaller)
    for index, allocation in enumerate(smaller.allocations):
        if allocation.phase is Phase.OPTIMIZER and allocation.component is Component.TEMPORARIES:
            draft.resize(index, size(allocation))
    return draft.build()


KOREAN = """
Train low-rank adapters.
    저랭크 어댑터만 학습합니다.
After the model is made, before the optimizer:
    모델을 만든 뒤, 옵티마이저를 만들기 전에:
lora needs peft: pip install 'flatout[lora]'
    lora에는 peft가 필요합니다: pip install 'flatout[lora]'
only thin matrices are trained; another training
    얇은 행렬만 학습하므로 다른 학습이 됩니다
no gradients and states for the weights, adapters in their place
    가중치의 그래디언트와 상태 대신 어댑터의 것만 둡니다
no model got adapters before the first step
    첫 스텝 전에 어댑터가 붙은 모델이 없습니다
{kind} knows its parameters already
    {kind}이(가) 이미 파라미터를 등록했습니다
the script put adapters into the model itself
    스크립트가 모델에 어댑터를 직접 넣었습니다
the model has no linear layers before its last one that are trained
    모델의 마지막 층 앞에 학습되는 선형 층이 없습니다
this optimizer holds no weight of a layer with adapters
    이 옵티마이저에는 어댑터가 붙은 층의 가중치가 없습니다
"""
