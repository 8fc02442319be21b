"""Repetition, frequency and presence penalties where a row's history is the path that leads to it.

vLLM's own kernel (v1/worker/gpu/sample/penalties.py) counts the drafts before a row as its history, which is right
for a chain. The arithmetic here is that kernel's, in its order, so that a chain comes out bit for bit the same.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl

MAX_BLOCK = 8192


@triton.jit
def _tree_penalties_kernel(
    logits_ptr,  # [L, V]
    logits_stride,
    slot_ptr,  # int [L]
    token_ids_ptr,  # int [L]
    local_pos_ptr,  # int32 [L]
    live_ptr,  # int32 [L]
    parents_ptr,  # int32 [S, N]
    parents_stride,
    repetition_ptr,  # float32 [S]
    frequency_ptr,  # float32 [S]
    presence_ptr,  # float32 [S]
    prompt_mask_ptr,  # int32 [S, ceil(V / 32)]
    prompt_mask_stride,
    counts_ptr,  # int32 [S, V]
    counts_stride,
    vocab_size,
    max_depth,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    if slot < 0:
        return
    repetition = tl.load(repetition_ptr + slot)
    frequency = tl.load(frequency_ptr + slot)
    presence = tl.load(presence_ptr + slot)
    if (repetition == 1.0) & (frequency == 0.0) & (presence == 0.0):
        return
    start = tl.program_id(1) * BLOCK
    token = start + tl.arange(0, BLOCK)
    in_vocab = token < vocab_size
    logits = tl.load(logits_ptr + row * logits_stride + token, mask=in_vocab, other=0.0).to(tl.float32)
    counts = tl.load(counts_ptr + slot * counts_stride + token, mask=in_vocab, other=0)

    local_pos = tl.load(local_pos_ptr + row)
    root = row - local_pos
    current = tl.where(local_pos <= tl.load(live_ptr + row), local_pos, 0)
    depth = tl.full((), 0, tl.int32)
    while (current > 0) & (depth < max_depth):
        counts += (token == tl.load(token_ids_ptr + root + current)).to(tl.int32)
        current = tl.load(parents_ptr + slot * parents_stride + current - 1)
        depth += 1
    generated = counts > 0

    if repetition != 1.0:
        word = start // 32 + tl.arange(0, BLOCK // 32)
        packed = tl.load(
            prompt_mask_ptr + slot * prompt_mask_stride + word, mask=word < tl.cdiv(vocab_size, 32), other=0
        )
        in_prompt = ((packed[:, None] >> tl.arange(0, 32)[None, :]) & 1).reshape(BLOCK) != 0
        scale = tl.where(in_prompt | generated, repetition, 1.0)
        logits *= tl.where(logits > 0, 1.0 / scale, scale)
    logits -= frequency * counts
    logits -= presence * generated.to(tl.float32)
    tl.store(logits_ptr + row * logits_stride + token, logits, mask=in_vocab)


def tree_penalties(
    *,
    logits: torch.Tensor,
    idx_mapping_per_row: torch.Tensor,
    token_ids: torch.Tensor,
    local_pos: torch.Tensor,
    live_per_row: torch.Tensor,
    parents: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    prompt_bin_mask: torch.Tensor,
    output_bin_counts: torch.Tensor,
    max_depth: int,
) -> None:
    """Penalise each row's logits for the prompt, the output so far and the drafts on the row's own path; one launch.

    Rows of requests without penalties are not read. A dead row is penalised as the root is.

    Args:
        logits: [L, V], changed in place; rows contiguous.
        idx_mapping_per_row: int [L] slot of each logits row; negative entries are padding.
        token_ids: int [L] token of each logits row.
        local_pos: int32 [L] number of the row inside its request.
        live_per_row: int32 [L] live nodes of the row's request.
        parents: int32 [S, N] row of each node's parent.
        repetition, frequency, presence: float32 [S].
        prompt_bin_mask: int32 [S, ceil(V / 32)], bit v % 32 of word v // 32: token v is in the prompt.
        output_bin_counts: int32 [S, V], how often each token was generated.
        max_depth: depth of the deepest possible node.
    """
    num_rows, vocab_size = logits.shape
    block = min(MAX_BLOCK, max(32, triton.next_power_of_2(vocab_size)))
    _tree_penalties_kernel[(num_rows, triton.cdiv(vocab_size, block))](
        logits,
        logits.stride(0),
        idx_mapping_per_row,
        token_ids,
        local_pos,
        live_per_row,
        parents,
        parents.stride(0),
        repetition,
        frequency,
        presence,
        prompt_bin_mask,
        prompt_bin_mask.stride(0),
        output_bin_counts,
        output_bin_counts.stride(0),
        vocab_size,
        max_depth,
        BLOCK=block,
        num_warps=8,
    )
