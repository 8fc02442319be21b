"""Repetition, frequency and presence penalties in which a row's history is its path in the tree.

vLLM's kernel (v1/worker/gpu/sample/penalties.py) counts all drafts before a row, which suits chains. The arithmetic
here is in the same order, so chains get bitwise equal results.
"""

# mypy: disable-error-code="no-untyped-def"
from typing import NamedTuple

import torch
import triton
import triton.language as tl

MAX_BLOCK = 8192


class Penalties(NamedTuple):
    """Inputs of the penalties. L rows with logits, S slots, N nodes of a tree, V tokens of the vocabulary."""

    idx_mapping_per_row: torch.Tensor  # int [L] slot of each logits row; negative entries are padding
    token_ids: torch.Tensor  # int [L] token of each logits row
    local_pos: torch.Tensor  # int32 [L] number of the row inside its request
    live_per_row: torch.Tensor  # int32 [L] live nodes of the row's request
    parents: torch.Tensor  # int32 [S, N] row of each node's parent
    repetition: torch.Tensor  # float32 [S]
    frequency: torch.Tensor  # float32 [S]
    presence: torch.Tensor  # float32 [S]
    prompt_bin_mask: torch.Tensor  # int32 [S, ceil(V / 32)], bit v % 32 of word v // 32: token v is in the prompt
    output_bin_counts: torch.Tensor  # int32 [S, V], how often each token was generated
    max_depth: int  # depth of the deepest possible node


@triton.jit
def _tree_penalties_kernel(
    given,  # Penalties
    logits_ptr,  # [L, V]
    logits_stride,
    parents_stride,
    prompt_mask_stride,
    counts_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(given.idx_mapping_per_row + row).to(tl.int64)
    if slot < 0:
        return
    repetition = tl.load(given.repetition + slot)
    frequency = tl.load(given.frequency + slot)
    presence = tl.load(given.presence + slot)
    if (repetition == 1.0) & (frequency == 0.0) & (presence == 0.0):
        return
    start = tl.program_id(1) * BLOCK
    token = start + tl.arange(0, BLOCK)
    in_vocab = token < vocab_size
    logits = tl.load(logits_ptr + row * logits_stride + token, mask=in_vocab, other=0.0).to(tl.float32)
    counts = tl.load(given.output_bin_counts + slot * counts_stride + token, mask=in_vocab, other=0)

    local_pos = tl.load(given.local_pos + row)
    root = row - local_pos
    current = tl.where(local_pos <= tl.load(given.live_per_row + row), local_pos, 0)
    depth = tl.full((), 0, tl.int32)
    while (current > 0) & (depth < given.max_depth):
        counts += (token == tl.load(given.token_ids + root + current)).to(tl.int32)
        current = tl.load(given.parents + slot * parents_stride + current - 1)
        depth += 1
    generated = counts > 0

    if repetition != 1.0:
        word = start // 32 + tl.arange(0, BLOCK // 32)
        packed = tl.load(
            given.prompt_bin_mask + slot * prompt_mask_stride + word, mask=word < tl.cdiv(vocab_size, 32), other=0
        )
        in_prompt = ((packed[:, None] >> tl.arange(0, 32)[None, :]) & 1).reshape(BLOCK) != 0
        scale = tl.where(in_prompt | generated, repetition, 1.0)
        logits *= tl.where(logits > 0, 1.0 / scale, scale)
    logits -= frequency * counts
    logits -= presence * generated.to(tl.float32)
    tl.store(logits_ptr + row * logits_stride + token, logits, mask=in_vocab)


def tree_penalties(logits: torch.Tensor, given: Penalties) -> None:
    """Penalise each row's logits for the prompt, the output and the drafts on the row's path; one launch.

    The logits, [L, V] with contiguous rows, change in place. Rows without penalties are not read. A dead row is
    penalised like the root.
    """
    num_rows, vocab_size = logits.shape
    block = min(MAX_BLOCK, max(32, triton.next_power_of_2(vocab_size)))
    by_slot = (given.parents, given.prompt_bin_mask, given.output_bin_counts)
    _tree_penalties_kernel[(num_rows, triton.cdiv(vocab_size, block))](
        given,
        logits,
        logits.stride(0),
        *(tensor.stride(0) for tensor in by_slot),
        vocab_size,
        BLOCK=block,
        num_warps=8,
    )
