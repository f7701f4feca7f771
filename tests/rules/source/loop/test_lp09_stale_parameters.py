import pytest

from tests.rules.source.scenario import codes_in

CODE = "import torch\nfrom torch import nn\nmodel = make()\n{first}\n{second}\n"
OPTIMIZER = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)"


def test_a_layer_that_is_replaced_too_late_is_found():
    text = CODE.format(first=OPTIMIZER, second="model.head.fc = nn.Linear(3, 4)")

    assert codes_in(text) == {"LP09": [5]}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("model.fc = nn.Linear(3, 4)", OPTIMIZER),
        (OPTIMIZER, "other.fc = nn.Linear(3, 4)"),
        (OPTIMIZER, "model.criterion_name = 'mse'"),
        (OPTIMIZER, f"{OPTIMIZER}\nmodel.fc = load()"),
        (OPTIMIZER, f"train()\nmodel.fc = nn.Linear(3, 4)\n{OPTIMIZER}\ntrain()"),
    ],
)
def test_other_orders_and_other_models_are_left_alone(first, second):
    assert codes_in(CODE.format(first=first, second=second)) == {}


@pytest.mark.parametrize(
    "second",
    [
        "model.criterion = nn.CrossEntropyLoss()",
        "model.act = nn.GELU()",
        "model.head = nn.Sequential(model.head, nn.Sigmoid())",
        "model.body = nn.parallel.DistributedDataParallel(model.body)",
        "model.fc = nn.Linear(model.fc.in_features, 4)\n"
        "optimizer.add_param_group({'params': model.fc.parameters()})",
    ],
)
def test_what_brings_no_parameters_that_the_optimizer_lacks_is_left_alone(second):
    assert codes_in(CODE.format(first=OPTIMIZER, second=second)) == {}


@pytest.mark.parametrize(
    "between",
    [
        "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 9)",
        "other = torch.optim.SGD(critic.parameters())",
    ],
)
def test_a_schedule_or_the_optimizer_of_another_model_makes_it_no_better(between):
    second = f"{between}\nmodel.fc = nn.Linear(3, 4)"

    assert codes_in(CODE.format(first=OPTIMIZER, second=second)) == {"LP09": [6]}


def test_a_layer_of_the_size_of_the_old_one_is_another_layer():
    second = "model.fc = nn.Linear(model.fc.in_features, 4)"

    assert codes_in(CODE.format(first=OPTIMIZER, second=second)) == {"LP09": [5]}
