"""A small model, and the ways in which scripts compute a loss of its logits."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH, CLASSES = 48, 16, 4100
BATCH = (4, 12)
STEPS = 3


class Net(nn.Module):
    def __init__(self, *, bias=True, tied=False):
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.body(self.tokens(tokens))))


def flat(logits, target, **options):
    if "ignore_index" in options:
        target = target.where(target != -100, options["ignore_index"])
    return F.cross_entropy(logits.view(-1, CLASSES), target.view(-1), **options)


def shifted(logits, target):
    kept = logits[..., :-1, :].contiguous()
    return F.cross_entropy(kept.view(-1, CLASSES), target[..., 1:].reshape(-1))


def upcast(logits, target):
    return flat(logits.float(), target)


def by_module(logits, target):
    return nn.CrossEntropyLoss()(logits.flatten(0, 1), target.flatten())


def reshaped(logits, target):
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), target.reshape(-1))


def sliced_batch(logits, target):
    return flat(logits[:3], target[:3])


def two_losses(logits, target):
    return flat(logits, target) + flat(logits, target.flip(0))


def batch():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(CLASSES, BATCH, generator=generator)
    target = torch.randint(CLASSES, BATCH, generator=generator)
    target[0, :5] = 7
    target[1, 3] = -100
    return tokens, target


def plainly(loss, **options):
    def step(net, optimizer, tokens, target):
        del optimizer
        made = loss(net(tokens), target, **options)
        made.backward()
        return made

    return step


def autocast(net, optimizer, tokens, target):
    del optimizer
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = flat(net(tokens), target)
    loss.backward()
    return loss


def half(dtype):
    def step(net, optimizer, tokens, target):
        del optimizer
        made = flat(net.to(dtype)(tokens), target)
        made.backward()
        return made.float()

    return step


def accumulated(net, optimizer, tokens, target):
    del optimizer
    losses = [flat(net(tokens[part]), target[part]) / 2 for part in (slice(2), slice(2, 4))]
    for loss in losses:
        loss.backward()
    return sum(losses)


def scaled(net, optimizer, tokens, target):
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    loss = flat(net(tokens), target)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    return loss


def backward_twice(net, optimizer, tokens, target):
    del optimizer
    loss = flat(net(tokens), target)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def frozen_head(net, optimizer, tokens, target):
    del optimizer
    weight = net.head.weight
    weight.requires_grad_(requires_grad=False)
    weight.grad = torch.zeros_like(weight)
    loss = flat(net(tokens), target)
    loss.backward()
    return loss


def with_penalty(net, optimizer, tokens, target):
    """A second loss of the same logits: their gradients add up."""
    del optimizer
    logits = net(tokens)
    loss = flat(logits, target) + 1e-3 * logits.square().mean()
    loss.backward()
    return loss


def with_penalty_first(net, optimizer, tokens, target):
    del optimizer
    logits = net(tokens)
    loss = 1e-3 * logits.square().mean() + flat(logits, target)
    loss.backward()
    return loss


def measured(mode):
    """An accuracy of the logits that the loss is of, without gradients."""

    def step(net, optimizer, tokens, target):
        del optimizer
        logits = net(tokens).view(-1, CLASSES)
        with mode():
            logits.argmax(-1)
        loss = flat(logits, target) + 1e-3 * net.tokens.weight.square().mean()
        loss.backward()
        return loss

    return step


def retyped(net, optimizer, tokens, target):
    del optimizer
    logits = net(tokens)
    loss = 1e-3 * logits.type(torch.float64).square().mean().float() + flat(logits, target)
    loss.backward()
    return loss


def below_python(net, optimizer, tokens, target):
    """As an extension does it."""
    del optimizer
    logits = net(tokens)
    with torch._C.DisableTorchFunctionSubclass():
        penalty = logits.square().mean()
    loss = 1e-3 * penalty + flat(logits, target)
    loss.backward()
    return loss


def changed_copy(net, optimizer, tokens, target):
    """Of a slice, whose own values stay."""
    del optimizer
    kept = net(tokens)[..., :-1, :]
    other = kept.contiguous()
    other *= 2.0
    labels = target[..., 1:].reshape(-1)
    losses = [F.cross_entropy(x.reshape(-1, CLASSES), labels) for x in (kept, other)]
    sum(losses).backward()
    return sum(losses)


class Raw(torch.optim.SGD):
    """Writes as kernels of their own do: no version is counted."""

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(group["lr"] * parameter.grad)


def own_function(net, optimizer, tokens, target):
    """What no Python function of torch sees still has the layer's gradient."""
    del optimizer
    logits = net(tokens)
    loss = flat(logits, target) + Squares.apply(logits)
    loss.backward()
    return loss


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return logits.square().mean()

    @staticmethod
    def backward(ctx, gradient):
        (logits,) = ctx.saved_tensors
        return gradient * 2 * logits / logits.numel()


def hooked(net, optimizer, tokens, target):
    del optimizer
    logits = net(tokens)
    logits.register_hook(lambda gradient: 2 * gradient)
    loss = flat(logits, target)
    loss.backward()
    return loss


def changed_in_place(net, optimizer, tokens, target):
    del optimizer
    logits = net(tokens)
    logits[..., 5] = -30.0
    logits /= 2.0
    loss = flat(logits, target)
    loss.backward()
    return loss


def softened(net, optimizer, tokens, target):
    del optimizer
    loss = flat(30 * torch.tanh(net(tokens) / 30), target)
    loss.backward()
    return loss


def checkpointed(net, optimizer, tokens, target):
    del optimizer
    loss = checkpoint(lambda x: flat(net(x), target), tokens, use_reentrant=False)
    loss.backward()
    return loss


def copied(net, optimizer, tokens, target):
    """An average of the weights, as copies make it: theirs are not those of the model."""
    del optimizer
    other = copy.deepcopy(net)
    loss = flat(net(tokens), target) + 0 * flat(other(tokens), target)
    loss.backward()
    return loss
