"""Which token rows of a step are a request's: device functions that the kernels of a step share."""

# mypy: disable-error-code="no-untyped-def"
import triton
import triton.language as tl


@triton.jit
def draft_nodes(num_rows):
    """``layout.verified_nodes``, of a request's verification rows. The last one of an odd number stands for none."""
    return tl.maximum(num_rows - 2, 0) // 2


@triton.jit
def request_rows(
    query_start_loc_ptr,  # int32 [R + 1]
    cu_rows_ptr,  # int32 [R + 1]
    request,
):
    """Token row of a request's root (int64), its verification rows and how many of them are draft nodes."""
    num_rows = tl.load(cu_rows_ptr + request + 1) - tl.load(cu_rows_ptr + request)
    first = (tl.load(query_start_loc_ptr + request + 1) - num_rows).to(tl.int64)
    return first, num_rows, draft_nodes(num_rows)
