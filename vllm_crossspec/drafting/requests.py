"""Copies a batch's slots, temperatures and seeds to where CUDA graphs read them; one launch."""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl


# One variant for every batch, so that no request waits for a compilation.
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


def copy_requests(given: tuple[torch.Tensor, ...], out: tuple[torch.Tensor, ...], num_reqs: int) -> None:
    """Copy slots, temperatures and seeds of ``num_reqs`` requests into a drafter's buffers; further slots become -1."""
    max_num_reqs, block = len(out[0]), 256
    _copy_requests_kernel[(triton.cdiv(max_num_reqs, block),)](*given, *out, num_reqs, max_num_reqs, BLOCK=block)
