"""The best single path of a tree, for requests that must have a chain (grammar, bad words, thinking budget)."""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl

from vllm_crossspec.types import TokenTree


@triton.jit
def _to_chain_kernel(
    tokens_ptr,  # int64 [R, N], in place
    tokens_stride,
    parents_ptr,  # int32 [R, N], in place
    parents_stride,
    log_probs_ptr,  # float32 [R, N], in place
    log_probs_stride,
    sizes_ptr,  # int32 [R], in place
    chain_only_ptr,  # bool [R], or [S] with idx_mapping
    idx_mapping_ptr,  # int [R]
    num_nodes,
    max_depth,
    BY_SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = row
    if BY_SLOT:
        slot = tl.load(idx_mapping_ptr + row).to(tl.int64)
    if slot < 0:
        return
    if tl.load(chain_only_ptr + slot) == 0:
        return
    tokens_ptr += row * tokens_stride
    parents_ptr += row * parents_stride
    log_probs_ptr += row * log_probs_stride
    size = tl.minimum(tl.load(sizes_ptr + row), num_nodes)
    i = tl.arange(0, BLOCK)
    is_node = i < size

    # Expected accepted length of the path to each node, and its depth: all nodes walk up together. Row 0 is the root.
    expected = tl.zeros([BLOCK], tl.float32)
    depth = tl.zeros([BLOCK], tl.int32)
    cur = tl.where(is_node, i + 1, 0)
    for _ in range(max_depth):
        log_prob = tl.load(log_probs_ptr + cur - 1, mask=cur > 0, other=float("-inf"))
        expected += tl.exp(log_prob)
        depth += (cur > 0).to(tl.int32)
        cur = tl.load(parents_ptr + cur - 1, mask=cur > 0, other=0)
    best = tl.argmax(tl.where(is_node, expected, -1.0), axis=0)
    length = tl.sum(tl.where(i == best, depth, 0), axis=0)

    # source[k]: row of the path's node at depth k + 1.
    source = tl.zeros([BLOCK], tl.int32)
    at = tl.where(size > 0, best + 1, 0)
    for k in range(length):
        source = tl.where(i == length - 1 - k, at, source)
        at = tl.load(parents_ptr + at - 1, mask=at > 0, other=0)
    on_path = i < length
    token = tl.load(tokens_ptr + source - 1, mask=on_path, other=0)
    log_prob = tl.load(log_probs_ptr + source - 1, mask=on_path, other=float("-inf"))
    # Every thread has read what another is about to overwrite.
    tl.debug_barrier()
    inside = i < num_nodes
    tl.store(tokens_ptr + i, token, mask=inside)
    tl.store(parents_ptr + i, tl.where(on_path, i, 0), mask=inside)
    tl.store(log_probs_ptr + i, log_prob, mask=inside)
    tl.store(sizes_ptr + row, length)


def to_chain(
    *,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    log_probs: torch.Tensor,
    sizes: torch.Tensor,
    chain_only: torch.Tensor,
    max_depth: int,
    idx_mapping: torch.Tensor | None = None,
) -> None:
    """Replace the trees of flagged requests, in place, by their most promising path; one launch.

    The path is the one to the node with the largest expected accepted length, the sum of exp(log_prob) over its
    ancestors and itself; of several largest the first node wins. It is renumbered as a chain; what is left over is dead
    (token 0, parent 0, -inf).

    Args:
        tokens, parents, log_probs, sizes: the trees, see :class:`vllm_crossspec.types.TokenTree`.
        chain_only: bool [R] flags of the rows; [S] flags of the slots where ``idx_mapping`` is given.
        max_depth: no tree is deeper.
        idx_mapping: int [R] slot of each row; negative rows are padding and stay as they are.
    """
    num_reqs = tokens.shape[0] if idx_mapping is None else idx_mapping.shape[0]
    num_nodes = tokens.shape[1]
    _to_chain_kernel[(num_reqs,)](
        *TokenTree(tokens, parents, log_probs, sizes).arguments,
        chain_only,
        chain_only if idx_mapping is None else idx_mapping,
        num_nodes,
        max_depth,
        BY_SLOT=idx_mapping is not None,
        BLOCK=triton.next_power_of_2(num_nodes),
        num_warps=1,
    )
