"""research/quantized_drafter.py: numbers that eight bits hold come back, others within half a step."""

import pytest
import torch
from quantized_drafter import TYPES, rounded


@pytest.mark.parametrize("name", list(TYPES))
@pytest.mark.parametrize("by_row", [False, True])
def test_matrices_are_rounded_to_steps_of_their_scale(name, by_row):
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[1.0], [3], [9], [27], [81]]
    )
    found = rounded(weight, TYPES[name], by_row)
    largest = weight.abs().amax(1, keepdim=True) if by_row else weight.abs().amax()
    step = largest / 127 if name == "int8" else weight.abs() / 8 + largest / 448 / 512
    assert ((found - weight).abs() <= 0.5001 * step).all() and not torch.equal(found, weight)
    assert torch.equal(rounded(found, TYPES[name], by_row), found), "what eight bits hold"
