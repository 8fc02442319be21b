"""The best tokens of a dense output layer: the target's noise, the best K and their log-probabilities in two launches.

PyTorch's own operations take about ten: noise, a float32 copy, the best K, and seven for the sum of exponentials. Shape
legend: B rows, V draft vocabulary.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl

from vllm_crossspec.drafting.flashhead.kernels import CHUNK, TopTokens, join_chunks, keep_best
from vllm_crossspec.drafting.noise import NoiseKeys, coupled

MAX_K = 32
"""Most candidates that are found one after the other."""


@triton.jit
def _chunk_logits_kernel(
    logits_ptr,  # [B, V], the drafter's
    logits_stride,
    best_ptr,  # int64 [B, chunks * K] out
    sums_ptr,  # float32 [B, chunks, 2] out
    vocab_size,
    sharpness,  # factor of the logits in rows without noise
    offsets_ptr,  # int64 [V] target id - draft id, or None
    idx_mapping_ptr,  # int [B / ROWS_PER_ENTRY], or None: no row has noise
    positions_ptr,  # int64 [B]
    temperature_ptr,  # float32 [S]
    seeds_ptr,  # int64 [S]
    ROWS_PER_ENTRY: tl.constexpr,
    USE_FP64: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    x = tl.load(logits_ptr + row * logits_stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    if idx_mapping_ptr is not None:
        x = coupled(
            x, token, inside, row, sharpness, offsets_ptr, idx_mapping_ptr, positions_ptr, temperature_ptr, seeds_ptr,
            ROWS_PER_ENTRY, USE_FP64,
        )  # fmt: skip
    keep_best(x, token, row * tl.num_programs(0) + tl.program_id(0), best_ptr, sums_ptr, K)


def best_logits(logits: torch.Tensor, k: int, keys: NoiseKeys | None, offsets: torch.Tensor | None = None) -> TopTokens:
    """The best ``k`` tokens of every row, as the target's ids; two launches.

    Args:
        logits: [B, V] of any float type, the last dimension contiguous.
        k: at most :data:`MAX_K`, and V.
        keys: of the target's noise; None: logits are ranked as they are.
        offsets: int64 [V] target id minus draft id; None if the vocabularies are the same.
    """
    (num_rows, vocab_size), device = logits.shape, logits.device
    assert k <= min(MAX_K, vocab_size) and logits.stride(1) == 1
    chunks = triton.cdiv(vocab_size, CHUNK)
    best = torch.empty(num_rows, chunks * k, dtype=torch.int64, device=device)
    sums = torch.empty(num_rows, chunks, 2, dtype=torch.float32, device=device)
    shape = (num_rows, k)
    out = TopTokens(torch.empty(shape, dtype=torch.int64, device=device), torch.empty(shape, device=device))
    noise = (None,) * 5 if keys is None else keys._replace(offsets=offsets).arguments
    constants = {"ROWS_PER_ENTRY": 1, "USE_FP64": False} if keys is None else keys.constants(num_rows)
    sizes = (vocab_size, 1.0 if keys is None else keys.sharpness)
    _chunk_logits_kernel[(chunks, num_rows)](
        logits, logits.stride(0), best, sums, *sizes, *noise, **constants, K=k, BLOCK=CHUNK
    )
    join_chunks(best, sums, out, offsets=offsets)
    return out
