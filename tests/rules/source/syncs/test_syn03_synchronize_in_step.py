from tests.rules.source.scenario import codes_in, fixed
from tests.rules.source.training import READ

SAME_LOSSES = (READ, f"{READ}        torch.cuda.synchronize()\n")
IS_ON_GPU = True
STEP = """
import torch{more}
for step, x in enumerate(loader):
    optimizer.zero_grad()
    model(x.cuda()).sum().backward()
    optimizer.step()
    {line}
torch.cuda.synchronize()
"""
WAIT = "torch.cuda.synchronize()"


def test_a_wait_in_every_step_is_found_and_taken_out():
    text = STEP.format(more="", line=WAIT)

    assert codes_in(text) == {"SYN03": [7]}
    assert fixed(text, "SYN03") == text.replace(f"    {WAIT}\n", "")


def test_where_times_are_taken_nothing_is_taken_out():
    text = STEP.format(more=", time\nstart = time.time()", line=WAIT)

    assert codes_in(text) == {"SYN03": [8]}
    assert fixed(text, "SYN03") == text


def test_rare_waits_and_those_outside_are_left_alone():
    assert codes_in(STEP.format(more="", line=f"if step % 50 == 0: {WAIT}")) == {}


def test_a_benchmark_without_an_optimizer_waits_for_its_times():
    text = STEP.format(more="", line=WAIT).replace("    optimizer.step()\n", "")

    assert codes_in(text) == {}


def test_a_wait_in_the_loop_of_a_function_is_found():
    body = STEP.format(more="", line=WAIT).splitlines()[2:-1]
    text = "import torch\ndef main():\n" + "".join(f"    {line}\n" for line in body)

    assert codes_in(text) == {"SYN03": [7]}
