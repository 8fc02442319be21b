"""The tokens that a draft goes on from, as lookups want them; one launch for the whole batch."""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl


@triton.jit
def _last_tokens_kernel(
    idx_mapping_ptr,  # int [R]
    num_computed_ptr,  # int32 [S]
    all_token_ids_ptr,  # int32 [S, L]
    all_token_ids_stride,
    contexts_ptr,  # int64 [R, W] out
    contexts_stride,
    last_position,
    width,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    slot = tl.load(idx_mapping_ptr + request).to(tl.int64)
    # The token at this position is known and not computed: the next draft goes on from it.
    newest = tl.minimum(tl.load(num_computed_ptr + tl.maximum(slot, 0)).to(tl.int64), last_position)
    position = tl.where(slot >= 0, newest - (width - 1) + place, -1)
    is_token = (place < width) & (position >= 0)
    token = tl.load(all_token_ids_ptr + slot * all_token_ids_stride + position, mask=is_token, other=-1).to(tl.int64)
    tl.store(contexts_ptr + request * contexts_stride + place, token, mask=place < width)


def last_tokens(
    *, idx_mapping: torch.Tensor, num_computed: torch.Tensor, all_token_ids: torch.Tensor, contexts: torch.Tensor
) -> None:
    """The last known tokens of every request.

    Args:
        idx_mapping: int [R] slot of each request; negative entries are padding.
        num_computed: int32 [S] tokens in the target's cache, this step's accepted ones included; one more is known.
        all_token_ids: int32 [S, L] prompt and accepted tokens.
        contexts: int64 [R, W], written: the latest last; -1 before the beginning and for padding.
    """
    num_reqs, width = contexts.shape
    _last_tokens_kernel[(num_reqs,)](
        idx_mapping,
        num_computed,
        all_token_ids,
        all_token_ids.stride(0),
        contexts,
        contexts.stride(0),
        all_token_ids.shape[1] - 1,
        width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=1,
    )
