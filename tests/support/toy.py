"""A made-up training step as the tracer would record it: blocks, a head, Adam, two steps."""

from flatout.records.memory_stream import (
    Allocation,
    Component,
    Mark,
    MemoryStream,
    Phase,
    StreamEvent,
)

VOCABULARY = 10_000
WIDTH = 256
TOKENS = 64
FP32, INT64 = 4, 8


class Recorder:
    """Collects allocations and events in the order in which they happen."""

    def __init__(self, batch, layers, odd):
        self.batch, self.layers, self.odd = batch, layers, odd
        self.shapes = [("head", (VOCABULARY, WIDTH))]
        self.shapes += [(f"blocks.{layer}", (WIDTH, 4 * WIDTH)) for layer in range(layers)]
        self.states, self.gradients = [], []
        self.allocations = []
        self.events = []
        self.marks = []
        self.phase, self.step = Phase.SETUP, 0

    def enter(self, phase, step):
        self.phase, self.step = phase, step
        self.marks.append(Mark(len(self.events), phase, step))

    def make(self, shape, component, operator="", module="", itemsize=FP32, dtype="float32"):
        size = itemsize
        for dim in shape:
            size *= dim
        self.allocations.append(
            Allocation(
                size=size,
                component=component,
                phase=self.phase,
                step=self.step,
                operator=operator,
                module=module,
                line="train.py:7",
                shape=tuple(shape),
                dtype=dtype,
            )
        )
        index = len(self.allocations) - 1
        self.events.append(StreamEvent(index, born=True))
        return index

    def free(self, index):
        self.events.append(StreamEvent(index, born=False))


def toy_stream(batch=4, layers=4, steps=2, *, odd=0):
    """Return the stream of a small language model; `odd` bytes make sizes that are not affine."""
    work = Recorder(batch, layers, odd)
    work.enter(Phase.SETUP, 0)
    for module, shape in work.shapes:
        work.make(shape, Component.PARAMETERS, "empty", module)
    for step in range(steps):
        play_step(work, step)
    return MemoryStream(
        allocations=tuple(work.allocations),
        events=work.events,
        marks=tuple(work.marks),
        device="cuda",
        method="virtual_cuda",
        steps=steps,
        batch=batch,
        model_flops=6.0 * batch * TOKENS * WIDTH * (VOCABULARY + 4 * WIDTH * layers),
    )


def play_step(work, step):
    work.enter(Phase.DATA, step)
    tokens = work.make((work.batch, TOKENS), Component.INPUTS, "_to_copy", "", INT64, "int64")
    for gradient in work.gradients:
        work.free(gradient)
    work.enter(Phase.FORWARD, step)
    activations = forward(work)
    rows = work.batch * TOKENS
    logits = work.make((rows, VOCABULARY), Component.ACTIVATIONS, "aten.mm.default", "head")
    chances = work.make((rows, VOCABULARY), Component.ACTIVATIONS, "aten._log_softmax.default")
    loss = work.make((), Component.ACTIVATIONS, "aten.nll_loss_forward.default")
    work.free(logits)
    backward(work, step, activations, chances)
    work.free(loss)
    work.enter(Phase.OPTIMIZER, step)
    optimize(work)
    work.free(tokens)


def forward(work):
    activations = []
    for layer in range(work.layers):
        name = f"blocks.{layer}"
        rows = work.batch * TOKENS
        wide = work.make(
            (rows * 4 * WIDTH + work.odd * work.batch**2,),
            Component.ACTIVATIONS,
            "aten.addmm.default",
            f"{name}.up",
        )
        gelu = work.make((rows, 4 * WIDTH), Component.ACTIVATIONS, "aten.gelu", f"{name}.act")
        out = work.make((rows, WIDTH), Component.ACTIVATIONS, "aten.addmm", f"{name}.down")
        activations.append((wide, gelu, out))
    return activations


def backward(work, step, activations, chances):
    work.enter(Phase.BACKWARD, step)
    rows = work.batch * TOKENS
    operator = "aten._log_softmax_backward_data"
    spread = work.make((rows, VOCABULARY), Component.TEMPORARIES, operator)
    work.free(chances)
    work.gradients = [work.make(work.shapes[0][1], Component.GRADIENTS, "aten.mm.default", "head")]
    flow = work.make((rows, WIDTH), Component.TEMPORARIES, "aten.mm.default", "head")
    work.free(spread)
    for layer in reversed(range(work.layers)):
        module, shape = work.shapes[layer + 1]
        work.gradients.append(work.make(shape, Component.GRADIENTS, "aten.mm.default", module))
        after = work.make((rows, WIDTH), Component.TEMPORARIES, "aten.mm.default", module)
        for index in activations[layer]:
            work.free(index)
        work.free(flow)
        flow = after
    work.free(flow)


def optimize(work):
    if not work.states:
        for _module, shape in work.shapes:
            for _state in range(2):
                operator = "aten.zeros_like.default"
                work.states.append(work.make(shape, Component.OPTIMIZER, operator))
    parts = [
        work.make(shape, Component.TEMPORARIES, "aten._foreach_sqrt.default")
        for _module, shape in work.shapes
    ]
    for part in parts:
        work.free(part)
