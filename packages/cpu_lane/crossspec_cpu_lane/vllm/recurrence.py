"""Mamba-2 over draft tokens on a machine without a GPU, in PyTorch.

vLLM's CPU kernels of it take one token a request, and keep the state behind it alone. Verification brings several, of
which some are refused: vLLM's Triton kernels keep a state behind each of them, and begin the next step behind the one
that was accepted last. Here the same is done, in the same places of the cache.
"""

import functools
from typing import Any

import torch
from torch.nn import functional


def convolve_drafts(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    conv_state_indices: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> torch.Tensor:
    """A causal convolution over each request's rows, behind what it accepted in the step before.

    Args:
        x: [T, C] inputs of all rows, one request's after the other's.
        conv_state: [blocks, C, S] last inputs of each request, oldest first; S is at least W - 1 + draft tokens.
            Changed: of the rows each request has, all inputs are kept, for the next step's start is not known yet.
        weight: [C, W].
        bias: [C].
        activation: "silu" or None.
        conv_state_indices: int [R, 1 + drafts], of which the first column is the block of this state.
        num_accepted_tokens: int [R] that the step before kept, its own sample included.
        query_start_loc: int [R + 1] first rows.

    Returns:
        [T, C].
    """
    num_prior = weight.shape[1] - 1
    rows, is_row = _rows(query_start_loc)
    blocks = conv_state_indices[:, 0].long()
    state = conv_state[blocks]
    first = (num_accepted_tokens.long() - 1)[:, None] + torch.arange(num_prior)
    prior = state.gather(2, first[:, None].expand(-1, state.shape[1], -1))
    seen = torch.cat([prior, x[rows].transpose(1, 2).to(state.dtype)], dim=2)
    convolved = functional.conv1d(seen.to(weight.dtype), weight[:, None], bias, groups=len(weight)).transpose(1, 2)
    if activation is not None:
        convolved = functional.silu(convolved)
    is_kept = torch.cat([is_row.new_ones(len(rows), num_prior - 1), is_row], dim=1)[:, None]
    width = is_kept.shape[2]
    state[:, :, :width] = torch.where(is_kept, seen[:, :, 1:], state[:, :, :width])
    conv_state[blocks] = state
    out = torch.empty_like(x)
    out[rows[is_row]] = convolved[is_row].to(out.dtype)
    return out


def recur_over_drafts(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    state_batch_indices: torch.Tensor,
    out: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> None:
    """The recurrence of Mamba-2 over each request's rows; the names are vLLM's and its paper's.

    Args:
        state: [blocks, H, P, N]; the blocks of the rows are written.
        x: [T, H, P] inputs.
        dt: [T, H, P] time steps before the bias and the softplus.
        A: [H, P, N] decays.
        B: [T, G, N] of the inputs; H is a multiple of G.
        C: [T, G, N] of the outputs.
        D: [H, P] of what goes past the state.
        dt_bias: [H, P].
        state_batch_indices: int [R, 1 + drafts] a block for the state behind each row.
        out: [T, H, P], written.
        num_accepted_tokens: int [R] that the step before kept: the state behind the last of them is where rows begin.
        cu_seqlens: int [R + 1] first rows.
    """
    rows, is_row = _rows(cu_seqlens)
    blocks = state_batch_indices.long()
    repeats = x.shape[1] // B.shape[1]
    now = state[blocks.gather(1, (num_accepted_tokens.long() - 1)[:, None])[:, 0]].float()
    for number in range(rows.shape[1]):
        here, live = rows[:, number], is_row[:, number]
        step = functional.softplus(dt[here].float() + dt_bias.float())[..., None]
        come, read = (
            matrix[here].float().repeat_interleave(repeats, dim=1)[:, :, None] for matrix in (B, C)
        )  # [R, H, 1, N]
        now = now * torch.exp(A * step) + step * x[here].float()[..., None] * come
        seen = (now * read).sum(-1) + D.float() * x[here].float()
        out[here[live]] = seen[live].to(out.dtype)
        state[blocks[live, number]] = now[live].to(state.dtype)


def _rows(starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [R, M] rows of each request, M those of the longest; bool [R, M] whether there is one."""
    starts = starts.long()
    lengths = starts.diff()
    numbers = torch.arange(int(lengths.max()))
    is_row = numbers < lengths[:, None]
    return torch.where(is_row, starts[:-1, None] + numbers, 0), is_row


def convolution(original: Any) -> Any:
    """In the place of vLLM's ``causal_conv1d_update``: as it where nothing is speculated."""

    @functools.wraps(original)
    def causal_conv1d_update(
        x: torch.Tensor,
        conv_state: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: Any = None,
        conv_state_indices: torch.Tensor | None = None,
        num_accepted_tokens: torch.Tensor | None = None,
        query_start_loc: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        if num_accepted_tokens is None:
            return original(x, conv_state, weight, bias, activation, conv_state_indices, query_start_loc, **options)
        assert conv_state_indices is not None and query_start_loc is not None
        return convolve_drafts(
            x, conv_state, weight, bias, activation, conv_state_indices, num_accepted_tokens, query_start_loc
        )

    return causal_conv1d_update


def recurrence(original: Any) -> Any:
    """In the place of vLLM's ``selective_state_update``: as it where nothing is speculated."""

    @functools.wraps(original)
    def selective_state_update(
        state: torch.Tensor,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor,
        dt_bias: torch.Tensor,
        num_accepted_tokens: torch.Tensor | None = None,
        **options: Any,
    ) -> None:
        if num_accepted_tokens is None:
            original(state, x, dt, A, B, C, D, dt_bias, **options)
            return
        assert options["dt_softplus"], "as Mamba-2's layer calls it"
        indices, out, starts = options["state_batch_indices"], options["out"], options["cu_seqlens"]
        recur_over_drafts(state, x, dt, A, B, C, D, dt_bias, indices, out, num_accepted_tokens, starts)

    return selective_state_update
