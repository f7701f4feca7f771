"""Small real trainings under a session that fires the documented events; every fault by request."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from flatout.agent.guard.pinning import round_once
from flatout.agent.guard.record import GuardRecord, read_record
from flatout.agent.guard.recorder import GuardRecorder

Batch = tuple[Tensor, Tensor]


class FakeSession:
    """Fires events as the real session does, but lets a listener's exception out."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.roots: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.scaler: Any = None
        self.listeners: dict[str, list[Callable[..., None]]] = {}
        self.steps_heard = 0
        self._depth = 0

    @property
    def last_scale(self) -> float:
        return self.scaler.get_scale() if self.scaler is not None else 1.0

    def on(self, event: str, listener: Callable[..., None]) -> None:
        self.listeners.setdefault(event, []).append(listener)

    def fire(self, event: str, *args: Any) -> None:
        for listener in self.listeners.get(event, []):
            listener(*args)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Hear optimizer steps through torch's global hooks."""
        hooks = (
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def backward(self, loss: Tensor, raw: Tensor | None = None) -> None:
        self.fire("loss", loss if raw is None else raw)
        loss.backward()
        self.fire("backward_end")

    def forward(self, model: nn.Module, *args: Any) -> Any:
        if all(root is not model for root in self.roots):
            self.roots.append(model)
            self.fire("root", model)
        self.fire("forward", model, args, {})
        return model(*args)

    def _before(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self.steps_heard += 1
            self.fire("before_step", optimizer)

    def _after(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.fire("after_step", optimizer)


def nothing(*_: Any) -> None:
    """Change nothing."""


def as_given(_step: int, batch: Batch) -> Batch:
    """Return the batch as the loader made it."""
    return batch


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How one run differs from the plain loop."""

    device: str = "cpu"
    steps: int = 20
    threads: int = 1
    rounds: bool = False
    """Round inputs and weights to bf16, once."""
    nudges: bool = False
    """Move the last digits of each of them instead."""
    autocast: bool = False
    compile: bool = False
    channels_last: bool = False
    accumulate: int = 1
    divide: bool = True
    scaled: bool = False
    unscale: bool = True
    clip: float = 1.0
    zero_grad: bool = True
    kind: Any = torch.optim.AdamW
    optimizer: tuple[tuple[str, Any], ...] = ()
    """Arguments of the optimizer, as pairs."""
    prepare: Callable[[nn.Module], None] = nothing
    """Before the optimizer is built."""
    replace: Callable[[nn.Module], None] = nothing
    """After the optimizer is built."""
    at_forward: Callable[[nn.Module], None] = nothing
    load: Callable[[int, Batch], Batch] = as_given
    """What the loader makes of a batch; it is seen at the loader hook point."""
    feed: Callable[[int, Batch], Batch] = as_given
    """What becomes of a batch behind the loader hook point."""
    after_backward: Callable[[nn.Module], None] = nothing


@dataclass(frozen=True, kw_only=True)
class Case:
    """One small training."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Tensor, Tensor], Tensor]


def train(
    case: Case, path: Path, setting: Setting | None = None, reference: Path | None = None
) -> GuardRecord:
    """Run a training under the recorder and return what it wrote."""
    setting = setting or Setting()
    threads = torch.get_num_threads()
    torch.set_num_threads(setting.threads)
    torch.manual_seed(0)
    session = FakeSession()
    spec = {"reference": str(reference)} if reference else {}
    if setting.rounds or setting.nudges:
        round_once(session, to_bf16=not setting.nudges)
    GuardRecorder(session, spec, path)
    try:
        with session.hooked():
            _loop(case, setting, session)
    finally:
        torch.set_num_threads(threads)
    session.fire("stop")
    return read_record(path)


def _loop(case: Case, setting: Setting, session: FakeSession) -> None:
    model = case.model().to(setting.device)
    if setting.channels_last:
        model.to(memory_format=torch.channels_last)
    setting.prepare(model)
    optimizer = setting.kind(model.parameters(), **{"lr": 1e-3} | dict(setting.optimizer))
    session.optimizers.append(optimizer)
    setting.replace(model)
    if setting.compile:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model.compile()
    kind = setting.device
    scaler = torch.amp.GradScaler(kind, init_scale=2.0**16) if setting.scaled else None
    session.scaler = scaler
    for step in range(setting.steps):
        for micro in _micro_batches(case, setting, step):
            session.fire("batch", micro, "train.py:loader")
            x, y = (part.to(kind) for part in setting.feed(step, micro))
            setting.at_forward(model)
            with torch.autocast(kind, torch.bfloat16, enabled=setting.autocast):
                loss = case.loss(_output(session, model, x, setting).float(), y)
            if setting.divide:
                loss = loss / setting.accumulate
            session.backward(scaler.scale(loss) if scaler else loss, loss)
            setting.after_backward(model)
        _step(model, optimizer, scaler, setting)


def _output(session: FakeSession, model: nn.Module, x: Tensor, setting: Setting) -> Tensor:
    if setting.channels_last:
        session.fire("forward", model, (x,), {})
        if model not in session.roots:
            session.roots.append(model)
        return model(x.to(memory_format=torch.channels_last))
    return session.forward(model, x)


def _micro_batches(case: Case, setting: Setting, step: int) -> Iterator[Batch]:
    x, y = setting.load(step, case.batch(step))
    yield from zip(x.chunk(setting.accumulate), y.chunk(setting.accumulate), strict=True)


def _step(model: nn.Module, optimizer: Any, scaler: Any, setting: Setting) -> None:
    if scaler and setting.unscale:
        scaler.unscale_(optimizer)
    if setting.clip:
        nn.utils.clip_grad_norm_(model.parameters(), setting.clip)
    if scaler:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    if setting.zero_grad:
        optimizer.zero_grad()


# The trainings.


class Net(nn.Sequential):
    """A chain whose forward is no torch file's: dynamo compiles nothing that starts in one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part(x).view(batch, length, 4, width // 4).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.drop = Attention(width), nn.Dropout(0.0)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, 32), nn.Embedding(16, 32)
        self.blocks = nn.ModuleList(Block(32) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(48, 32)
        self.recurrent, self.head = nn.LSTM(32, 32, batch_first=True), nn.Linear(32, 48)

    def forward(self, x: Tensor) -> Tensor:
        # On a CPU without AVX-512, oneDNN has no LSTM in bf16, and torch 2.13 raises instead of
        # falling back to its own.
        has_onednn = True
        torch._C._set_mkldnn_enabled(not torch.is_autocast_enabled("cpu"))
        try:
            return self.head(self.recurrent(self.tokens(x))[0])
        finally:
            torch._C._set_mkldnn_enabled(has_onednn)


def conv_net() -> nn.Module:
    return Net(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


def mlp() -> nn.Module:
    return Net(
        nn.Linear(32, 64),
        nn.ReLU(),
        nn.Dropout(0.0),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + step)


def vectors(step: int) -> Batch:
    x = torch.randn(32, 32, generator=generator(step))
    return x, (x @ torch.randn(32, 10, generator=generator(-1))).argmax(1)


def images(step: int) -> Batch:
    y = torch.randint(0, 10, (16,), generator=generator(step))
    noise = torch.randn(16, 3, 12, 12, generator=generator(step + 500))
    return noise + y[:, None, None, None] / 5, y


def tokens(step: int, vocabulary: int = 48) -> Batch:
    start = torch.randint(0, vocabulary, (8, 1), generator=generator(step))
    stride = torch.randint(1, 4, (8, 1), generator=generator(step + 500))
    row = (start + stride * torch.arange(17)) % vocabulary
    return row[:, :-1], row[:, 1:]


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


CASES: Mapping[str, Case] = {
    "mlp": Case(model=mlp, batch=vectors, loss=F.cross_entropy),
    "conv": Case(model=conv_net, batch=images, loss=F.cross_entropy),
    "gpt": Case(model=GPT, batch=functools.partial(tokens, vocabulary=64), loss=token_loss),
    "lstm": Case(model=LSTM, batch=tokens, loss=token_loss),
}
