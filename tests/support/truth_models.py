"""Training steps of the kinds people train, small enough to run for real in a second or two."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from flatout.planner.tracing.training_step import TrainingStep

VOCABULARY = 1000


def images(side: int):
    def batch(count, device):
        picture = torch.zeros(count, 3, side, side, device=device)
        return picture, torch.zeros(count, dtype=torch.long, device=device)

    return batch


def tokens(length: int):
    def batch(count, device):
        return tuple(torch.zeros(count, length, dtype=torch.long, device=device) for _ in "xy")

    return batch


def named_tokens(length: int, labels: int | None = None):
    def batch(count, device):
        ids = torch.zeros(count, length, dtype=torch.long, device=device)
        shape = (count,) if labels is None else (count, labels)
        return {"input_ids": ids, "labels": torch.zeros(shape, dtype=torch.long, device=device)}

    return batch


def classified(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def next_token(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    logits = model(batch[0])
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), batch[1].view(-1))


def named_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(1024, 10),
    )


class Bottleneck(nn.Module):
    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        outer = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inner, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outer, 1, bias=False),
            nn.BatchNorm2d(outer),
        )
        is_same = stride == 1 and inner == outer
        self.short = nn.Identity() if is_same else _projection(inner, outer, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        out += self.short(x)
        return F.relu(out, inplace=True)


def _projection(inner: int, outer: int, stride: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))


def resnet_50() -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    inner = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        for block in range(count):
            width = 64 * 2**stage
            layers.append(Bottleneck(inner, width, 2 if stage and not block else 1))
            inner = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, 1000))


def double(inner: int, outer: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inner, outer, 3, padding=1),
        nn.GroupNorm(8, outer),
        nn.SiLU(),
        nn.Conv2d(outer, outer, 3, padding=1),
        nn.GroupNorm(8, outer),
        nn.SiLU(),
    )


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.bottom = double(3, 32), double(32, 64), double(64, 128)
        self.up = nn.ConvTranspose2d(128, 64, 2, 2)
        self.join, self.last = double(128, 64), nn.Conv2d(64, 3, 1)
        self.grow, self.end = nn.Upsample(scale_factor=2), double(96, 32)
        self.out = nn.Conv2d(32, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        down = self.down(F.max_pool2d(first, 2))
        bottom = self.bottom(F.max_pool2d(down, 2))
        joined = self.join(torch.cat([self.up(bottom), down], 1))
        return self.out(self.end(torch.cat([self.grow(joined), first], 1)))


def restored(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[0])


class Block(nn.Module):
    def __init__(self, width: int, heads: int, *, is_causal: bool, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.is_causal, self.dropout = heads, is_causal, dropout
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.first(x)).split(width, 2)
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.second(x))


class Gpt(nn.Module):
    def __init__(self, *, checkpoints: str = "", width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, 4, is_causal=True) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            if self.checkpoints:
                x = checkpoint(block, x, use_reentrant=self.checkpoints == "reentrant")
            else:
                x = block(x)
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 64)
        self.layers = kind(64, 128, 2, batch_first=True)
        self.head = nn.Linear(128, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.words(ids))[0])


class Experts(nn.Module):
    """A mixture with a capacity for each expert, as Switch has it: its shapes are fixed."""

    def __init__(self, width: int = 128, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights = self.gate(flat).softmax(-1)
        capacity = flat.shape[0] // len(self.experts)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            weight, chosen = weights[:, number].topk(capacity)
            out = out.index_add(0, chosen, expert(flat[chosen]) * weight[:, None])
        return out.view_as(x)


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 128)
        self.blocks = nn.Sequential(*(Experts() for _ in range(3)))
        self.head = nn.Linear(128, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(ids)))


class DiffusionBlock(nn.Module):
    """A DiT block's modulation by the time, over patches of a picture."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 6 * width))
        self.blocks = nn.ModuleList(Block(width, 4, is_causal=False) for _ in range(3))
        self.out = nn.ConvTranspose2d(width, 3, 4, 4)
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        times = torch.rand(x.shape[0], self.width, device=x.device)
        patches = self.patches(x + noise)
        rows = patches.flatten(2).transpose(1, 2)
        for block in self.blocks:
            shift, scale, gate, *_ = self.time(times).chunk(6, 1)
            rows = rows + gate[:, None] * block(rows * (1 + scale[:, None]) + shift[:, None])
        return self.out(rows.transpose(1, 2).reshape_as(patches)) - noise


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=512
        )
    )


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=512,
            image_size=64,
        )
    )


def vit_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).logits, batch[1])


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(n_embd=128, n_layer=3, n_head=4, vocab_size=VOCABULARY, use_cache=False)
    )


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(gpt2(), LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True))


def _subject(model, batch, loss, optimizer, **more) -> TrainingStep:
    return TrainingStep(model=model, batch=batch, loss=loss, optimizer=optimizer, **more)


MODELS = {
    "small_cnn": _subject(small_cnn, images(32), classified, momentum, batch_size=64),
    "resnet_50": _subject(resnet_50, images(128), classified, momentum, batch_size=4),
    "unet": _subject(UNet, images(64), restored, adamw, batch_size=4),
    "bert": _subject(bert, named_tokens(64), named_loss, adamw, batch_size=8),
    "gpt2": _subject(gpt2, named_tokens(64, 64), named_loss, adamw, batch_size=8),
    "vit": _subject(vit, images(64), vit_loss, adamw, batch_size=16),
    "gpt": _subject(Gpt, tokens(128), next_token, adamw, batch_size=8),
    "lstm": _subject(lambda: Recurrent(nn.LSTM), tokens(64), next_token, adamw, batch_size=32),
    "gru": _subject(lambda: Recurrent(nn.GRU), tokens(32), next_token, adamw, batch_size=32),
    "experts": _subject(MixtureOfExperts, tokens(128), next_token, adamw, batch_size=16),
    "diffusion": _subject(DiffusionBlock, images(64), restored, adamw, batch_size=16),
    "lora": _subject(lora, named_tokens(64, 64), named_loss, adamw, batch_size=8),
    "checkpointed": _subject(
        lambda: Gpt(checkpoints="yes"), tokens(128), next_token, adamw, batch_size=16
    ),
    "reentrant": _subject(
        lambda: Gpt(checkpoints="reentrant"), tokens(128), next_token, adamw, batch_size=16
    ),
    "accumulated": _subject(Gpt, tokens(128), next_token, adamw, batch_size=4, accumulate=4),
    "autocast": _subject(Gpt, tokens(128), next_token, adamw, batch_size=8, autocast="bfloat16"),
    "clipped_sgd": _subject(
        Gpt, tokens(64), next_token, momentum, batch_size=8, clip_norm=1.0, accumulate=2
    ),
}
