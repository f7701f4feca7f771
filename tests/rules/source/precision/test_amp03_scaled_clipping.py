from tests.rules.source.scenario import codes_in, fixed

NEW_LOSSES = "the gradients are clipped at the length that was meant"
STEP = """
import torch
from torch.nn.utils import clip_grad_norm_
def step(x):
    self.optimizer.zero_grad()
    self.scaler.scale(model(x)).backward()
    {line}
    self.scaler.step(self.optimizer)
    self.scaler.update()
"""
CLIP = "clip_grad_norm_(model.parameters(), 1.0)"


def test_clipping_of_scaled_gradients_is_found_and_unscaled():
    text = STEP.format(line=CLIP)

    assert codes_in(text) == {"AMP03": [7]}
    assert f"    self.scaler.unscale_(self.optimizer)\n    {CLIP}\n" in fixed(text, "AMP03")


def test_clipping_in_the_branch_without_a_scaler_is_left_alone():
    text = """
import torch
from torch.nn.utils import clip_grad_norm_
if amp:
    scaler.scale(loss).backward()
    scaler.step(optimizer)
else:
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
"""
    assert codes_in(text) == {}


def test_unscaled_and_unclipped_gradients_are_left_alone():
    assert codes_in(STEP.format(line=f"self.scaler.unscale_(self.optimizer)\n    {CLIP}")) == {}
    assert codes_in(STEP.format(line="pass")) == {}
    assert codes_in(STEP.format(line=CLIP).replace("self.scaler.scale(model(x))", "model(x)")) == {}


def test_of_several_optimizers_the_one_that_steps_next_is_unscaled():
    one = "scaler.scale({0}(x)).backward()\n{1}\nscaler.step({0}_optimizer)\n"
    clip = "clip_grad_norm_({0}.parameters(), 1.0)"
    head = "import torch\nfrom torch.nn.utils import clip_grad_norm_\n"
    text = head + "".join(one.format(name, clip.format(name)) for name in ("critic", "actor"))

    new = fixed(text, "AMP03")

    for name in ("critic", "actor"):
        assert f"scaler.unscale_({name}_optimizer)\n{clip.format(name)}\n" in new
