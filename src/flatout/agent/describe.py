"""Describe models and optimizers in plain values."""

import contextlib
import inspect
from collections import Counter
from typing import TYPE_CHECKING, Any

from flatout.agent.untouched import buffers_kept, streams_kept

if TYPE_CHECKING:
    import torch

ALIGNED = 8
"""Elements of 16 bytes in bf16: what fast matrix kernels want of rows."""
MIN_REPEATS = 2
"""From two identical siblings on, a block counts as repeated."""


def describe(module: "torch.nn.Module") -> dict[str, Any]:
    """Return the facts of a root module; keys as `flatout.records.profile.ModelFacts`."""
    from torch.nn.utils.parametrize import is_parametrized

    with contextlib.ExitStack() as kept:
        for part in filter(is_parametrized, module.modules()):
            # Reading a weight makes it: spectral norm moves its vectors each time, others may draw.
            kept.enter_context(buffers_kept(part))
            kept.enter_context(streams_kept())
        return _facts(module)


def _facts(module: "torch.nn.Module") -> dict[str, Any]:
    import torch

    every = list(module.parameters())
    parameters = [p for p in every if p.requires_grad]
    # 4-d weights of convolutions alone: an embedding of patches may be 4-d elsewhere too.
    weights = [
        m.weight
        for m in module.modules()
        if isinstance(m, torch.nn.Conv2d | torch.nn.ConvTranspose2d) and m.weight.dim() == 4
    ]
    kinds = [m for m in module.modules() if m is not module]
    head = next((m for m in reversed(kinds) if isinstance(m, torch.nn.Linear)), None)
    device = parameters[0].device.type if parameters else "cpu"
    return {
        "name": type(module).__name__,
        "parameters": sum(p.numel() for p in parameters),
        "parameter_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "all_parameters": sum(p.numel() for p in every),
        # Of frozen ones, too: they decide in what is computed, be they bf16 or quantised integers.
        "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in every if _is_weight(p)}),
        "conv_weights": len(weights),
        "is_channels_last": bool(weights)
        and all(w.is_contiguous(memory_format=torch.channels_last) for w in weights),
        "repeated_blocks": repeated_blocks(module),
        "modules": len(kinds),
        "is_compiled": is_compiled(module),
        "used_autocast": bool(torch.is_autocast_enabled(device)) or enters_autocast(module),
        "device": device,
        "softmax_modules": len(softmax_modules(module)),
        "finds_unused": bool(getattr(module, "find_unused_parameters", False)),
        **_experts(module),
        "head_parameters": head.weight.numel() if head is not None else 0,
        "odd_parameters": sum(m.weight.numel() for m in odd_layers(module)),
        "widest_output": head.out_features if head is not None else 0,
    }


def odd_layers(root: "torch.nn.Module") -> "list[torch.nn.Linear]":
    """Return the plain linear layers but the last with a width that is no multiple of `ALIGNED`."""
    from torch import nn

    layers = [m for m in root.modules() if isinstance(m, nn.Linear)][:-1]
    return [
        m
        for m in layers
        if type(m).forward is nn.Linear.forward
        and (m.in_features % ALIGNED or m.out_features % ALIGNED)
        and min(m.in_features, m.out_features) >= ALIGNED
    ]


def _experts(root: "torch.nn.Module") -> dict[str, int]:
    """Return how many experts a mixture has at most, and what all of them hold."""
    from torch import nn

    lists = [
        module
        for name, module in root.named_modules()
        if isinstance(module, nn.ModuleList)
        and "expert" in name.rpartition(".")[2].lower()
        and len({type(expert) for expert in module}) == 1
    ]
    return {
        "experts": max(map(len, lists), default=0),
        "expert_parameters": sum(p.numel() for one in lists for p in one.parameters()),
    }


def softmax_modules(root: "torch.nn.Module") -> "list[tuple[str, torch.nn.Module]]":
    """Return the modules of the script's own that take a softmax, with their names."""
    from torch import nn

    found = []
    for name, module in root.named_modules():
        # A scripted module's class has a descriptor there that cannot be asked for its value.
        forward = inspect.getattr_static(type(module), "forward")
        if not inspect.isfunction(forward) or forward.__module__.startswith("torch."):
            continue
        holds_softmax = any(isinstance(child, nn.Softmax) for child in module.children())
        if holds_softmax or "softmax" in _names_in(forward, type(module)):
            found.append((name, module))
    return found


def _names_in(function: Any, owner: type, depth: int = 2) -> set[str]:
    """Return the names in a function's code, and in that of the script's code that it calls."""
    names = set(function.__code__.co_names)
    for name in tuple(names) if depth else ():
        called = getattr(owner, name, None) or function.__globals__.get(name)
        if inspect.isfunction(called) and not called.__module__.startswith("torch."):
            names |= _names_in(called, owner, depth - 1)
    return names


def enters_autocast(module: "torch.nn.Module") -> bool:
    """Return whether a framework runs this module under autocast inside its forward.

    Accelerate, and with it the Trainer of transformers, wraps `forward` and keeps the original.
    """
    return any("_original_forward" in vars(part) for part in module.modules())


def is_compiled(module: "torch.nn.Module") -> bool:
    """Return whether the script compiled or scripted this module or a part of it."""
    from torch.jit import ScriptModule

    return any(
        isinstance(m, ScriptModule)
        or getattr(m, "_compiled_call_impl", None) is not None
        or hasattr(m, "_orig_mod")
        for m in module.modules()
    )


def _is_weight(parameter: Any) -> bool:
    """Return whether a parameter computes, unlike a counter or the seed of Keras."""
    return bool(parameter.dim() > 1 or parameter.is_floating_point() or parameter.is_complex())


def repeated_blocks(module: "torch.nn.Module") -> int:
    """Return the size of the largest group of sibling modules with one class and equal shapes."""
    largest = 0
    for parent in module.modules():
        groups = Counter(
            (type(child), tuple(tuple(p.shape) for p in child.parameters()))
            for child in parent.children()
            if any(True for _ in child.children())
        )
        largest = max([largest, *groups.values()])
    return largest if largest >= MIN_REPEATS else 0


def describe_optimizer(optimizer: "torch.optim.Optimizer") -> dict[str, Any]:
    """Return the facts of an optimizer; keys as `flatout.records.profile.OptimizerFacts`."""
    groups = optimizer.param_groups
    parameters = [p for group in groups for p in group["params"]]
    foreach = groups[0].get("foreach") if groups else None
    return {
        "name": type(optimizer).__name__,
        "parameters": sum(p.numel() for p in parameters),
        "parameter_tensors": len(parameters),
        "has_fused_option": bool(groups) and all("fused" in group for group in groups),
        "has_foreach_option": bool(groups) and all("foreach" in group for group in groups),
        "is_foreach": None if foreach is None else bool(foreach),
        "is_fused": bool(groups) and all(bool(group.get("fused")) for group in groups),
    }
