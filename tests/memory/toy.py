"""A made-up training step as the tracer would record it: blocks, a head, Adam, two steps."""

from flatout.memory.stream import Allocation, Component, Mark, MemoryStream, Phase, StreamEvent

VOCABULARY = 10_000
WIDTH = 256
TOKENS = 64
FP32, INT64 = 4, 8


class Recorder:
    """Collects allocations and events in the order in which they happen."""

    def __init__(self):
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
        self.events.append(StreamEvent(index, True))
        return index

    def free(self, index):
        self.events.append(StreamEvent(index, False))


def toy_stream(batch=4, layers=4, steps=2, *, odd=0):
    """Return the stream of a small language model; `odd` bytes make sizes that are not affine."""
    work = Recorder()
    work.enter(Phase.SETUP, 0)
    shapes = [("head", (VOCABULARY, WIDTH))]
    shapes += [(f"blocks.{layer}", (WIDTH, 4 * WIDTH)) for layer in range(layers)]
    for module, shape in shapes:
        work.make(shape, Component.PARAMETERS, "empty", module)
    states, gradients = [], []
    for step in range(steps):
        gradients = play_step(work, batch, layers, shapes, states, gradients, step, odd)
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


def play_step(work, batch, layers, shapes, states, gradients, step, odd):
    work.enter(Phase.DATA, step)
    tokens = work.make((batch, TOKENS), Component.INPUTS, "_to_copy", "", INT64, "int64")
    for gradient in gradients:
        work.free(gradient)
    work.enter(Phase.FORWARD, step)
    activations = forward(work, batch, layers, odd)
    rows = batch * TOKENS
    logits = work.make((rows, VOCABULARY), Component.ACTIVATIONS, "aten.mm.default", "head")
    chances = work.make((rows, VOCABULARY), Component.ACTIVATIONS, "aten._log_softmax.default")
    loss = work.make((), Component.ACTIVATIONS, "aten.nll_loss_forward.default")
    work.free(logits)
    work.enter(Phase.BACKWARD, step)
    spread = work.make((rows, VOCABULARY), Component.TEMPORARIES, "aten._log_softmax_backward_data")
    work.free(chances)
    gradients = [work.make(shapes[0][1], Component.GRADIENTS, "aten.mm.default", "head")]
    flow = work.make((rows, WIDTH), Component.TEMPORARIES, "aten.mm.default", "head")
    work.free(spread)
    for layer in reversed(range(layers)):
        module, shape = shapes[layer + 1]
        gradients.append(work.make(shape, Component.GRADIENTS, "aten.mm.default", module))
        after = work.make((rows, WIDTH), Component.TEMPORARIES, "aten.mm.default", module)
        for index in activations[layer]:
            work.free(index)
        work.free(flow)
        flow = after
    work.free(flow)
    work.free(loss)
    work.enter(Phase.OPTIMIZER, step)
    optimize(work, shapes, states)
    work.free(tokens)
    return gradients


def forward(work, batch, layers, odd):
    activations = []
    for layer in range(layers):
        name = f"blocks.{layer}"
        rows = batch * TOKENS
        wide = work.make(
            (rows * 4 * WIDTH + odd * batch * batch,),
            Component.ACTIVATIONS,
            "aten.addmm.default",
            f"{name}.up",
        )
        gelu = work.make((rows, 4 * WIDTH), Component.ACTIVATIONS, "aten.gelu", f"{name}.act")
        out = work.make((rows, WIDTH), Component.ACTIVATIONS, "aten.addmm", f"{name}.down")
        activations.append((wide, gelu, out))
    return activations


def optimize(work, shapes, states):
    if not states:
        for _module, shape in shapes:
            for _state in range(2):
                states.append(work.make(shape, Component.OPTIMIZER, "aten.zeros_like.default"))
    parts = [
        work.make(shape, Component.TEMPORARIES, "aten._foreach_sqrt.default")
        for _module, shape in shapes
    ]
    for part in parts:
        work.free(part)
