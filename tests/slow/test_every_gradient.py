"""Gradients, updates and statistics of every family x scheme x mode of batch norm equal autograd's to 1e-9 in float64. By hand:
`pytest tests/slow/test_every_gradient.py`, about a minute; tests/unit/engine/test_gradient_parity.py holds two thirds of it."""

import pytest
from engine_networks import FAMILIES, SCHEMES, WITH_BATCH_NORM
from engine_reference import check_steps

MODES = [(name, is_training) for name in FAMILIES for is_training in (False, True)[:1 + (name in WITH_BATCH_NORM)]]


@pytest.mark.parametrize("name, is_training", MODES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_steps_equal_autograd_and_torch_optim(one_thread, name, is_training, scheme):
    check_steps(name, scheme, is_training)
