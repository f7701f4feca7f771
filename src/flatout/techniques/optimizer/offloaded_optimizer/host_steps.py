"""Steps of an optimizer made on the host: its state never enters the device's memory."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

KNOWN = (
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adamax, torch.optim.Adadelta),
)
"""Classes whose step looks at each parameter with its gradient and state, and at nothing else."""
OF_SCALER = ("grad_scale", "found_inf")
"""What a GradScaler leaves on a fused optimizer for its step."""


def find_obstacle(optimizer: Optimizer) -> str | None:
    """Return why an optimizer cannot step on the host, or None."""
    return next(_obstacles(optimizer), None)


def _obstacles(optimizer: Optimizer) -> Iterator[str]:
    kind = type(optimizer)
    if kind not in KNOWN:
        yield f"{kind.__module__}.{kind.__name__} is not known to treat parameters one by one"
    groups = optimizer.param_groups
    if any(group.get("capturable") for group in groups):
        yield "the script asked for a step that CUDA graphs capture"
    if any(isinstance(group["lr"], torch.Tensor) for group in groups):
        yield "a rate is a tensor of the script's"
    parameters = [p for group in groups for p in group["params"]]
    if any(type(p) not in (torch.Tensor, torch.nn.Parameter) for p in parameters):
        yield "parameters are sharded or of a class of their own"
    if any(p.grad is not None and p.grad.is_sparse for p in parameters):
        yield "gradients are sparse"


class HostSteps:
    """Brings parameters and gradients to the host before each step, and parameters back after it.

    Those without a gradient stay where they are: no step looks at them.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.hosts: dict[torch.Tensor, torch.Tensor] = {}
        self.rooms: dict[torch.Tensor, torch.Tensor] = {}
        """Of each parameter the place of its gradient on the host."""
        self.own: list[list[torch.Tensor]] = []
        optimizer.register_step_pre_hook(self.before)
        optimizer.register_step_post_hook(self.after)

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Put the host's copies in the parameters' place; a closure is called first."""
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        changed = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            changed = ((args[0],) if args else ()), {"closure": lambda: loss}
        self.own = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [self._brought(p) for p in group["params"]]
        for device in {p.device for own in self.own for p in own if p.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        self._rename(optimizer, lambda p: self.hosts[p], lambda value: value.to("cpu"))
        for name in OF_SCALER:
            value = getattr(optimizer, name, None)
            if isinstance(value, torch.Tensor):
                setattr(optimizer, name, value.cpu())
        return changed

    def after(self, optimizer: Any, *_: Any) -> None:
        """Send the parameters to the device, and put them back in their place."""
        for group, own in zip(optimizer.param_groups, self.own, strict=True):
            group["params"] = own
            with torch.no_grad():
                for p in own:
                    if self.hosts[p].grad is not None:
                        p.copy_(self.hosts[p], non_blocking=True)
        owners = {host: p for p, host in self.hosts.items()}
        self._rename(optimizer, lambda host: owners[host], lambda value: value)
        for device in {p.device for own in self.own for p in own if p.is_cuda}:
            # The host's copies are written again in the next step: they must have left by then.
            torch.cuda.current_stream(device).synchronize()
        self.own = []

    def _brought(self, p: torch.Tensor) -> torch.Tensor:
        """Return the host's copy of a parameter, with its gradient."""
        if p not in self.hosts:
            self.hosts[p] = _room(p).requires_grad_(p.requires_grad)
            self.rooms[p] = _room(p)
        host = self.hosts[p]
        with torch.no_grad():
            host.grad = None
            if p.grad is not None:
                # Each time: torch's count of changes knows nothing of those made through `.data`.
                host.copy_(p, non_blocking=True)
                host.grad = self.rooms[p].copy_(p.grad, non_blocking=True)
        return host

    def _rename(
        self,
        optimizer: Any,
        other: Callable[[torch.Tensor], torch.Tensor],
        move: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Let the state belong to the other side's parameters."""
        for p in [p for own in self.own for p in own]:
            key = p if p in optimizer.state else self.hosts[p]
            if key not in optimizer.state:
                continue
            state = optimizer.state.pop(key)
            optimizer.state[other(key)] = {
                name: move(value) if isinstance(value, torch.Tensor) else value
                for name, value in state.items()
            }


def _room(p: torch.Tensor) -> torch.Tensor:
    """Return an empty place on the host in a parameter's form; pinned where that is a GPU's."""
    return torch.empty_like(p.detach(), device="cpu", pin_memory=p.is_cuda)


KOREAN = """
{kind} is not known to treat parameters one by one
    {kind}이(가) 파라미터를 하나씩 다루는지 알 수 없습니다
the script asked for a step that CUDA graphs capture
    스크립트가 CUDA 그래프에 기록되는 스텝(capturable)을 요청했습니다
a rate is a tensor of the script's
    학습률이 스크립트가 만든 텐서입니다
parameters are sharded or of a class of their own
    파라미터가 샤딩되어 있거나 자체 클래스입니다
gradients are sparse
    그래디언트가 희소합니다
"""
