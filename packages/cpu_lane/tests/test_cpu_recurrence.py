"""Mamba-2 over draft tokens on a CPU: token by token by definition, and from behind whatever was accepted."""

import pytest
import torch
from crossspec_cpu_lane.vllm.recurrence import convolve_drafts, recur_over_drafts
from torch.nn import functional

HEADS, WIDTH, STATE, GROUPS, TAPS = 4, 3, 5, 2, 4
STEPS = [(3, 2), (1, 1), (4, 4), (2, 1), (4, 3)]
"""Rows of a step (a sample and its drafts) and how many of them it keeps."""


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).float()


def walk(apply, rows, forget=False):
    """What was put out behind the kept rows of a path, where every step also brings rows that it does not keep.

    Args:
        apply: rows of a step, and how many the last one kept, to its output.
        rows: of the path, in order.
        forget: say each time that the last step kept one row.
    """
    out, at, kept = [], 0, 1
    for brought, keeps in STEPS:
        refused = [torch.full_like(row, 7.0) for row in rows[: brought - keeps]]
        out.extend(apply([*rows[at : at + keeps], *refused], 1 if forget else kept)[:keeps])
        at, kept = at + keeps, keeps
    return torch.stack(out)


@pytest.mark.parametrize("forget", [False, True])
def test_convolution_goes_on_behind_what_was_accepted(forget):
    weight, bias = numbers(6, TAPS), numbers(6)
    path = numbers(sum(keeps for _, keeps in STEPS), 6)
    state = torch.zeros(2, 6, TAPS - 1 + 4)

    def apply(rows, kept):
        block, starts = torch.tensor([[1, 0, 0, 0, 0]]), torch.tensor([0, len(rows)])
        return convolve_drafts(torch.stack(rows), state, weight, bias, "silu", block, torch.tensor([kept]), starts)

    found = walk(apply, [*path], forget)
    seen = functional.pad(path.T[None], (TAPS - 1, 0))
    wanted = functional.silu(functional.conv1d(seen, weight[:, None], bias, groups=6))[0].T
    assert torch.allclose(found, wanted, atol=1e-5) is not forget


@pytest.mark.parametrize("forget", [False, True])
def test_recurrence_goes_on_behind_what_was_accepted(forget):
    length = sum(keeps for _, keeps in STEPS)
    x, dt = numbers(length, HEADS, WIDTH), numbers(length, HEADS, WIDTH + 1)[..., :WIDTH].contiguous()
    decay, skip, bias = -numbers(HEADS, WIDTH, STATE).abs(), numbers(HEADS, WIDTH), numbers(HEADS, WIDTH).abs()
    b, c = numbers(length, GROUPS, STATE), numbers(length, GROUPS + 1, STATE)[:, :GROUPS].contiguous()
    state = torch.zeros(6, HEADS, WIDTH, STATE)
    blocks, path = torch.tensor([[1, 2, 3, 4, 5]]), [torch.full((1,), float(i)) for i in range(length)]

    def apply(rows, kept):
        at = torch.stack(rows).long()[:, 0] % length
        out = torch.empty(len(rows), HEADS, WIDTH)
        starts = torch.tensor([0, len(rows)])
        recur_over_drafts(
            state, x[at], dt[at], decay, b[at], c[at], skip, bias, blocks, out, torch.tensor([kept]), starts
        )
        return out

    found = walk(apply, path, forget)
    now, wanted = torch.zeros(HEADS, WIDTH, STATE), []
    for i in range(length):
        step = functional.softplus(dt[i] + bias)[..., None]
        come, read = (m[i].repeat_interleave(HEADS // GROUPS, 0)[:, None] for m in (b, c))
        now = now * torch.exp(decay * step) + step * x[i][..., None] * come
        wanted.append((now * read).sum(-1) + skip * x[i])
    assert torch.allclose(found, torch.stack(wanted), atol=1e-4) is not forget
