"""Phi of every tree of a batch, its bin, and the bin's depth and width, in one launch.

Shape legend: R requests, S most requests, T levels of the base tree, k top_k, C candidates, B bins.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl

from vllm_crossspec.trees.builders.dynamic import Grown


@triton.jit
def _entropy(log_probs):
    """Nats of the normalised distribution; entries of -inf are impossible, and NaN results if all are."""
    top = tl.max(log_probs, axis=0)
    shifted = tl.where(log_probs > float("-inf"), log_probs - top, float("-inf"))
    weights = tl.exp(shifted)
    total = tl.sum(weights, axis=0)
    weighted = tl.sum(tl.where(weights > 0, weights * shifted, 0.0), axis=0)
    return tl.log(total) - weighted / total


@triton.jit
def _assess_kernel(
    log_probs_ptr,  # float32 [R, C]
    log_probs_stride,
    beam_parents_ptr,  # int32 [T, R, k]
    beam_parents_stride_t,
    beam_parents_stride_r,
    beam_log_probs_ptr,  # float32 [T, R, k]
    beam_log_probs_stride_t,
    beam_log_probs_stride_r,
    thresholds_ptr,  # float32 [B - 1] rising
    extensions_ptr,  # int32 [B] levels that each bin adds
    widths_ptr,  # int32 [B] nodes that each bin keeps
    phi_ptr,  # float32 [S] nats, its first R are written; NaN for a tree that does not reach the depth
    bins_ptr,  # int32 [S], likewise, from 0
    limits_ptr,  # int32 [S], likewise: T plus the bin's extension
    caps_ptr,  # int32 [S], likewise: the bin's width
    num_thresholds,
    LEVELS: tl.constexpr,  # T
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    candidates = log_probs_ptr + row * log_probs_stride
    i = tl.arange(0, BLOCK_K)
    inside = i < TOP_K
    phi = _entropy(tl.load(candidates + i, mask=inside, other=float("-inf")))
    if LEVELS > 1:
        # The beam node whose best child is likeliest ends the path; log-probabilities of children are their path's.
        children = TOP_K + (LEVELS - 2) * TOP_K * TOP_K + i[:, None] * TOP_K + i[None, :]
        both = inside[:, None] & inside[None, :]
        best = tl.max(tl.load(candidates + children, mask=both, other=float("-inf")), axis=1)
        beam = beam_log_probs_ptr + row * beam_log_probs_stride_r
        own = tl.load(beam + (LEVELS - 2) * beam_log_probs_stride_t + i, mask=inside, other=0.0)
        confidence = tl.where(best > float("-inf"), best - own, float("-inf"))
        found, node = tl.max(confidence, axis=0, return_indices=True)
        parents = beam_parents_ptr + row * beam_parents_stride_r
        for up in range(LEVELS - 1):
            level = LEVELS - 2 - up  # of the node, from 0
            start = TOP_K + level * TOP_K * TOP_K + node * TOP_K
            phi += _entropy(tl.load(candidates + start + i, mask=inside, other=float("-inf")))
            node = tl.load(parents + level.to(tl.int64) * beam_parents_stride_t + node)
        phi = tl.where(found > float("-inf"), phi, float("nan"))

    b = tl.arange(0, BLOCK_B)
    threshold = tl.load(thresholds_ptr + b, mask=b < num_thresholds, other=float("inf"))
    # Not "above": a NaN must be in the last bin.
    beyond = tl.where(phi <= threshold, 0, 1)
    chosen = tl.sum(tl.where(b < num_thresholds, beyond, 0), axis=0)
    tl.store(phi_ptr + row, phi)
    tl.store(bins_ptr + row, chosen)
    tl.store(limits_ptr + row, LEVELS + tl.load(extensions_ptr + chosen))
    tl.store(caps_ptr + row, tl.load(widths_ptr + chosen))


def assess(
    *,
    grown: Grown,
    levels: int,
    thresholds: torch.Tensor,
    extensions: torch.Tensor,
    widths: torch.Tensor,
    phi: torch.Tensor,
    bins: torch.Tensor,
    limits: torch.Tensor,
    caps: torch.Tensor,
) -> None:
    """Phi of each tree (HeteroSpec, equation 1), its bin, and the bin's depth and width; one launch, no sync.

    Phi sums the normalised entropies of the ``top_k`` children of every node along a path from the root to the last
    level but one. The path's last node has the likeliest first child; at ties the earlier beam node's path counts.
    ``grown`` are R trees of the base depth ``levels`` (T). Shapes as of the kernel.
    """
    num_reqs, top_k = grown.log_probs.shape[0], grown.beam_parents.shape[2]
    assert grown.log_probs.stride(1) == grown.beam_parents.stride(2) == grown.beam_log_probs.stride(2) == 1
    _assess_kernel[(num_reqs,)](
        grown.log_probs, grown.log_probs.stride(0),
        grown.beam_parents, *grown.beam_parents.stride()[:2],
        grown.beam_log_probs, *grown.beam_log_probs.stride()[:2],
        thresholds, extensions, widths, phi, bins, limits, caps, thresholds.shape[0],
        LEVELS=levels, TOP_K=top_k, BLOCK_K=triton.next_power_of_2(top_k),
        BLOCK_B=triton.next_power_of_2(max(extensions.shape[0], 2)), num_warps=1,
    )  # fmt: skip
