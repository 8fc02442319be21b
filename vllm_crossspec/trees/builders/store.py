"""Storing a round's trees and their drafter by request slot, in one launch."""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl

from vllm_crossspec.types import NO_DRAFTS, TokenTree


# One variant for all drafters, so that no drafter's first draft waits for the compiler.
@triton.jit(do_not_specialize=["drafter"])
def _store_trees_kernel(
    tree_parents_ptr,  # int32 [R, n]
    tree_parents_stride,
    tree_sizes_ptr,  # int32 [R]
    idx_mapping_ptr,  # int [R]
    parents_ptr,  # int32 [S, N]
    parents_stride,
    sizes_ptr,  # int32 [S]
    modes_ptr,  # int32 [S]
    drafted_by_ptr,  # int32 [S]
    drafter,
    num_nodes,
    NO_DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(idx_mapping_ptr + row).to(tl.int64)
    if slot >= 0:
        node = tl.arange(0, BLOCK)
        inside = node < num_nodes
        parents = tl.load(tree_parents_ptr + row * tree_parents_stride + node, mask=inside)
        tl.store(parents_ptr + slot * parents_stride + node, parents, mask=inside)
        wants_none = tl.load(modes_ptr + slot) == NO_DRAFTS
        tl.store(sizes_ptr + slot, tl.where(wants_none, 0, tl.load(tree_sizes_ptr + row)))
        if not wants_none:
            tl.store(drafted_by_ptr + slot, drafter)


def store_trees(
    tree: TokenTree,
    idx_mapping: torch.Tensor,
    parents: torch.Tensor,
    sizes: torch.Tensor,
    modes: torch.Tensor,
    drafted_by: torch.Tensor,
    drafter: int,
) -> None:
    """Copy the trees of the batch's rows to their slots; one launch, no sync.

    Args:
        tree: [R, n] nodes, n at most N.
        idx_mapping: int [R] slot of each row; negative entries are skipped.
        parents: int32 [S, N], written.
        sizes: int32 [S], written; 0 if a request wants no drafts.
        modes: int32 [S] kind of drafts that each request allows (``types``).
        drafted_by: int32 [S], written except for requests that want no drafts: ``drafter``, its number.
    """
    num_nodes = tree.parents.shape[1]
    _store_trees_kernel[(idx_mapping.shape[0],)](
        tree.parents,
        tree.parents.stride(0),
        tree.sizes,
        idx_mapping,
        parents,
        parents.stride(0),
        sizes,
        modes,
        drafted_by,
        drafter,
        num_nodes,
        NO_DRAFTS=NO_DRAFTS,
        BLOCK=triton.next_power_of_2(num_nodes),
        num_warps=1,
    )
