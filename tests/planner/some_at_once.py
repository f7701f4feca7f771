"""The small trainings, for tests that are slow: what `make test` shows of them."""

import pytest

from tests.support.truth_models import MODELS

SOME_AT_ONCE = [
    pytest.param(name, marks=pytest.mark.smoke) if name in {"small_cnn", "gpt2"} else name
    for name in MODELS
]
