"""The acceptance counters as one launch."""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl

from vllm_crossspec.step.request_rows import draft_nodes
from vllm_crossspec.types import NO_DRAFTS


# One variant for all drafters: the first draft of one must not wait for the compiler.
@triton.jit(do_not_specialize=["drafter"])
def _mark_drafted_kernel(
    drafted_by_ptr,  # int32 [S], written
    modes_ptr,  # int32 [S] what each slot's request lets its drafter draft (`types`)
    idx_mapping_ptr,  # int [R] slot of each row; negative rows are padding
    drafter,
    NO_DRAFTS: tl.constexpr,
):
    slot = tl.load(idx_mapping_ptr + tl.program_id(0)).to(tl.int64)
    if tl.load(modes_ptr + slot, mask=slot >= 0, other=NO_DRAFTS) != NO_DRAFTS:
        tl.store(drafted_by_ptr + slot, drafter)


def mark_drafted(drafted_by: torch.Tensor, modes: torch.Tensor, idx_mapping: torch.Tensor, drafter: int) -> None:
    """Note that ``drafter`` (its number) drafted for the slots of a batch, except those with NO_DRAFTS."""
    _mark_drafted_kernel[(idx_mapping.shape[0],)](drafted_by, modes, idx_mapping, drafter, NO_DRAFTS=NO_DRAFTS)


@triton.jit
def _record_acceptance_kernel(
    counts_ptr,  # int64 [num_drafters, 3 + K] drafts, draft tokens, accepted tokens, accepted at each position
    counts_stride,
    drafted_by_ptr,  # int32 [S] the last drafter of the slot, -1 for none; cleared here
    idx_mapping_ptr,  # int [R] slot of each row; negative rows are padding
    num_sampled_ptr,  # int32 [R] accepted tokens of the step, the bonus token included
    num_rejected_ptr,  # int32 [R]
    num_computed_ptr,  # int32 [S] computed tokens after the step
    prefill_len_ptr,  # int32 [S] prompt length (and what a preempted request had generated)
    num_positions,
    CONTEMPLATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(idx_mapping_ptr + row).to(tl.int64)
    if slot < 0:
        return
    drafter = tl.load(drafted_by_ptr + slot)
    tl.store(drafted_by_ptr + slot, -1)
    sampled = tl.load(num_sampled_ptr + row)
    drafted = sampled + tl.load(num_rejected_ptr + row) - 1
    if CONTEMPLATES:
        drafted = draft_nodes(drafted + 1)
    start = tl.load(num_computed_ptr + slot) - sampled
    if (drafter < 0) | (drafted <= 0) | (start < tl.load(prefill_len_ptr + slot)):
        return
    base = counts_ptr + drafter.to(tl.int64) * counts_stride
    accepted = sampled - 1
    tl.atomic_add(base, 1)
    tl.atomic_add(base + 1, drafted.to(tl.int64))
    tl.atomic_add(base + 2, accepted.to(tl.int64))
    position = tl.arange(0, BLOCK)
    one = tl.full((BLOCK,), 1, tl.int64)
    tl.atomic_add(base + 3 + position, one, mask=(position < accepted) & (position < num_positions))


def record_acceptance(
    counts: torch.Tensor,
    drafted_by: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    num_computed: torch.Tensor,
    prefill_len: torch.Tensor,
    contemplates: bool = False,
) -> None:
    """Add the verification of every request's last draft to its drafter's counters; one launch, no sync.

    A row counts if its slot was drafted for since its last verification and its step began past the prompt. The
    scheduler pads other rows with placeholder drafts. With ``contemplates`` the rejected rows include contemplate rows
    (``contemplate_layout``), which do not count. Shapes as of the kernel.
    """
    num_positions = counts.shape[1] - 3
    # One warp: a second one could read drafted_by after the first has cleared it.
    _record_acceptance_kernel[(idx_mapping.shape[0],)](
        counts, counts.stride(0), drafted_by, idx_mapping, num_sampled, num_rejected, num_computed, prefill_len,
        num_positions, CONTEMPLATES=contemplates, BLOCK=triton.next_power_of_2(num_positions), num_warps=1,
    )  # fmt: skip
