"""Muon in float32, for processors that do not multiply bfloat16.

torch's Muon orthogonalizes in bfloat16. Where a processor has no such products that is most of a step's time: 28 of 32
seconds on an EPYC with AVX2, for the matrices of a drafter of width 576. The update is the same except for rounding.
"""

from typing import Any

import torch


class Float32Muon(torch.optim.Muon):
    """torch's Muon, with Nesterov's momentum and ``match_rms_adamw``; either resumes the state of the other."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step of all matrices that have a gradient; no closure is called."""
        for group in self.param_groups:
            decay, rate = 1 - group["lr"] * group["weight_decay"], 0.2 * group["lr"]
            for matrix in group["params"]:
                if (gradient := matrix.grad) is None:
                    continue
                momentum = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix))
                momentum.lerp_(gradient, 1 - group["momentum"])
                direction = gradient.lerp(momentum, group["momentum"])
                update = orthogonalized(direction, group["ns_coefficients"], group["ns_steps"], group["eps"])
                matrix.mul_(decay).add_(update, alpha=-rate * max(matrix.shape) ** 0.5)


def orthogonalized(
    x: torch.Tensor, coefficients: tuple[float, float, float], num_steps: int, epsilon: float
) -> torch.Tensor:
    """The nearest half-orthogonal matrix to x [m, n], roughly, by a quintic iteration (Jordan 2024)."""
    a, b, c = coefficients
    is_tall = x.shape[0] > x.shape[1]
    found = x.T if is_tall else x
    found = found / found.norm().clamp(min=epsilon)
    for _ in range(num_steps):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if is_tall else found
