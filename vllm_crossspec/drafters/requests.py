"""What drafters of every kind read of a batch's requests, put where CUDA graphs read it; one launch."""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl


# One variant for every batch: none may have to be compiled while requests wait.
@triton.jit(do_not_specialize=["from_mapping_ptr", "num_reqs"])
def _copy_requests_kernel(
    from_mapping_ptr,  # int [R]
    from_temperature_ptr,  # float32 [S]
    from_seeds_ptr,  # int64 [S]
    idx_mapping_ptr,  # int [S], written
    temperature_ptr,  # float32 [S], written
    seeds_ptr,  # int64 [S], written
    num_reqs,
    max_num_reqs,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < max_num_reqs
    slot = tl.load(from_mapping_ptr + i, mask=i < num_reqs, other=-1)
    tl.store(idx_mapping_ptr + i, slot.to(idx_mapping_ptr.dtype.element_ty), mask=inside)
    tl.store(temperature_ptr + i, tl.load(from_temperature_ptr + i, mask=inside), mask=inside)
    tl.store(seeds_ptr + i, tl.load(from_seeds_ptr + i, mask=inside), mask=inside)


def copy_requests(
    *,
    from_mapping: torch.Tensor,
    from_temperature: torch.Tensor,
    from_seeds: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    num_reqs: int,
) -> None:
    """Copy what the sampler knows of the requests into a drafter's own buffers; one launch.

    Args:
        from_mapping: int [at least num_reqs] slot of each request.
        from_temperature: float32 [S] of every slot.
        from_seeds: int64 [S] likewise.
        idx_mapping: int [S], written; -1 past the requests.
        temperature: float32 [S], written.
        seeds: int64 [S], written.
        num_reqs: R, 0 for a batch of which nothing may be drafted.
    """
    max_num_reqs, block = idx_mapping.shape[0], 256
    _copy_requests_kernel[(triton.cdiv(max_num_reqs, block),)](
        from_mapping,
        from_temperature,
        from_seeds,
        idx_mapping,
        temperature,
        seeds,
        num_reqs,
        max_num_reqs,
        BLOCK=block,
    )
