"""A chain as a tree whose every node has one child."""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl

from vllm_crossspec.types import TokenTree


@triton.jit
def _chain_kernel(
    drafted_ptr,  # int64 [R, K]
    drafted_stride,
    drafted_log_probs_ptr,  # float [R, K] or None
    drafted_log_probs_stride,
    tokens_ptr,  # int64 [R, width]
    tokens_stride,
    parents_ptr,  # int32 [R, width]
    parents_stride,
    log_probs_ptr,  # float32 [R, width]
    log_probs_stride,
    sizes_ptr,  # int32 [R]
    num_drafted,
    width,
    HAS_LOG_PROBS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    is_node = i < num_drafted
    inside = i < width
    token = tl.load(drafted_ptr + row * drafted_stride + i, mask=is_node, other=0)
    tl.store(tokens_ptr + row * tokens_stride + i, token, mask=inside)
    tl.store(parents_ptr + row * parents_stride + i, tl.where(is_node, i, 0), mask=inside)
    log_prob = tl.zeros([BLOCK], tl.float32)
    if HAS_LOG_PROBS:
        own = tl.load(drafted_log_probs_ptr + row * drafted_log_probs_stride + i, mask=is_node, other=0.0)
        log_prob = tl.cumsum(tl.minimum(own.to(tl.float32), 0.0), axis=0)
    log_prob = tl.where(is_node, log_prob, float("-inf"))
    tl.store(log_probs_ptr + row * log_probs_stride + i, log_prob, mask=inside)
    tl.store(sizes_ptr + row, num_drafted)


def chain(*, tokens: torch.Tensor, log_probs: torch.Tensor | None = None, out: TokenTree) -> None:
    """Write a drafter's first choices as trees; one launch.

    Args:
        tokens: int64 [R, K] drafted ids in the target's vocabulary.
        log_probs: float [R, K] the log-probability of each, given those before it; None where the drafter does not
            know it, and then every node counts as certain (0).
        out: its first R rows are written over their whole width W >= K; dead nodes get token 0, parent 0, -inf.
    """
    num_reqs, num_drafted = tokens.shape
    width = out.tokens.shape[1]
    assert num_drafted <= width and tokens.stride(1) == 1
    given = tokens if log_probs is None else log_probs
    _chain_kernel[(num_reqs,)](
        tokens,
        tokens.stride(0),
        given,
        given.stride(0),
        *out.arguments,
        num_drafted,
        width,
        HAS_LOG_PROBS=log_probs is not None,
        BLOCK=triton.next_power_of_2(width),
        num_warps=1,
    )
