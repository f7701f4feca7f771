"""Multiply in fp8: the linear layers of a compiled model, by torchao.

What it does: turns linear layers whose sizes are multiples of 16 into torchao's fp8 layers, with
one scale a tensor, and compiles the model: eager fp8 is several times slower.
When it helps: steps that are large matrix products, of thousands in each dimension, on GPUs that
have fp8.
What it costs: two to three bits of mantissa in the products, compilation, tuning of the recipe.
How it is checked: it changes the training on purpose, so losses are looked at for damage only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

from flatout.analysis.regime import addressable_ms
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, Technique, prior_for, process_state
from flatout.techniques.compile.torch_compile import check_compilable, compile_in_place, startup_s
from flatout.techniques.compile.torch_compile.compile_watch import CompileWatch

if TYPE_CHECKING:
    import torch

MIN_CAPABILITY = (8, 9)
"""Compute capability from which NVIDIA devices multiply fp8 (Ada, Hopper)."""
MIN_PARAMETERS = 1_000_000_000
"""From a billion parameters on products are large enough: fp8 gained 27 % at 3B and little below 1B
(llm-foundry, published)."""
MULTIPLE = 16
INSTALL = "fp8_training needs torchao: pip install 'flatout[lowbit]'"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Training(Technique):
    """Multiply in fp8 in the linear layers."""

    excludes_family: ClassVar[bool] = True
    addresses: ClassVar[frozenset[str]] = frozenset({"forward", "backward"})
    numerics: ClassVar[Numerics] = Numerics.TRAINING
    moves_random_stream: ClassVar[bool] = True
    extra: ClassVar[str] = "lowbit"
    by_hand: ClassVar[str] = """
Once the model is on its device, in bf16:
+ config = torchao.float8.Float8LinearConfig.from_recipe_name("$scaling")
+ config = dataclasses.replace(config, pad_inner_dim=True)
+ torchao.float8.convert_to_float8_training(model, config=config)
+ model.compile()
"""

    scaling: Literal["tensorwise", "rowwise"] = "tensorwise"
    """One scale for a tensor, faster, or for each row, closer."""
    watch: CompileWatch = process_state(CompileWatch)
    """Hears of what the compiler gives up."""

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["Fp8Training"]:
        """Return the technique for large models that no one compiled, on a device with fp8."""
        is_open = not any(model.is_compiled for model in profile.models)
        return [cls()] if has_fp8(profile, machine) and is_large(profile) and is_open else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect the products of forward and backward to shrink by its prior where it pays."""
        if not has_fp8(profile, machine) or not is_large(profile):
            return Effect(
                startup_s=startup_s(profile),
                why="no fp8 on this device, or products too small for it: nothing gets faster",
            )
        speedup = prior_for(self, profile).speedup
        products_ms = addressable_ms(profile, ("forward", "backward"), ("gemm", "compute"))
        return Effect(
            step_ms=-products_ms * (1 - 1 / speedup),
            startup_s=startup_s(profile),
            why=f"products in fp8, {products_ms:.1f} ms {speedup:.2f} times faster",
        )

    def model(self, root: Any) -> Any:
        """Turn the layers into fp8 ones and compile the root."""
        import torch

        parameter = next(root.parameters(), None)
        if parameter is None or not parameter.is_cuda:
            raise NotApplicable("fp8 products need a CUDA device")
        if torch.cuda.get_device_capability(parameter.device) < MIN_CAPABILITY:
            raise NotApplicable("this device has no fp8 products")
        check_compilable(root)
        to_fp8(root, self.scaling)
        self.watch.begin()
        compile_in_place(root)
        return root

    def end(self) -> str:
        """Say what was compiled, unless torch gave it up."""
        return self.watch.report()


def has_fp8(profile: Profile, machine: Machine) -> bool:
    """Return whether the device that trained multiplies fp8 in hardware."""
    capability = machine.device.compute_capability
    return profile.device_kind == "cuda" and capability is not None and capability >= MIN_CAPABILITY


def is_large(profile: Profile) -> bool:
    """Return whether a model has enough parameters for products that fp8 makes faster."""
    return sum(model.parameters for model in profile.models) >= MIN_PARAMETERS


def to_fp8(model: "torch.nn.Module", scaling: str = "tensorwise") -> "torch.nn.Module":
    """Turn a model's linear layers into fp8 ones in place, all but the last.

    Raises:
        NotApplicable: if torchao is missing, or no layer is a multiple of 16 in both sizes.
    """
    names = eligible_layers(model)
    if not names:
        raise NotApplicable(f"no linear layer but the last is a multiple of {MULTIPLE} both ways")
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise NotApplicable(INSTALL) from None
    config = padded(Float8LinearConfig.from_recipe_name(scaling))
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in names)
    return model


def padded(config: Any) -> Any:
    """Return torchao's configuration with inner dimensions filled up to a multiple of 16.

    That of a weight's gradient is the number of rows, batch by tokens, which can be any.
    """
    if not hasattr(config, "pad_inner_dim"):
        return config
    return replace(config, pad_inner_dim=True)


def eligible_layers(model: "torch.nn.Module") -> frozenset[str]:
    """Return the names of the linear layers that fp8 kernels take, without the output layer."""
    from torch import nn

    linear = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    return frozenset(
        name
        for name, layer in linear[:-1]
        if layer.in_features % MULTIPLE == 0 and layer.out_features % MULTIPLE == 0
    )


KOREAN = """
Multiply in fp8 in the linear layers.
    선형 층의 행렬 곱을 fp8로 계산합니다.
Once the model is on its device, in bf16:
    모델을 bf16으로 디바이스에 옮긴 뒤:
fp8_training needs torchao: pip install 'flatout[lowbit]'
    fp8_training에는 torchao가 필요합니다: pip install 'flatout[lowbit]'
no fp8 on this device, or products too small for it: nothing gets faster
    이 디바이스에 fp8이 없거나 행렬 곱이 너무 작아 빨라지지 않습니다
products in fp8, {ms} ms {ratio} times faster
    행렬 곱 {ms} ms가 fp8로 {ratio}배 빨라집니다
fp8 products need a CUDA device
    fp8 행렬 곱에는 CUDA 디바이스가 필요합니다
this device has no fp8 products
    이 디바이스는 fp8 행렬 곱을 하지 못합니다
no linear layer but the last is a multiple of {n} both ways
    마지막 층을 빼면 두 크기가 모두 {n}의 배수인 선형 층이 없습니다
"""
