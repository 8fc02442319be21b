"""Coupled drafts: a drafter ranks its candidates with the noise that the target will sample with.

vLLM samples by the Gumbel-max trick with noise keyed by (seed, position, token). With sample-and-match the text does
not depend on the drafts, so a drafter may use that noise. Its best candidate by ``logits / temperature + noise`` is the
token that the target is likeliest to *sample*. No draft probabilities are needed, also for trees.

A greedy request has no noise. Its target takes the likeliest token, which is the drafter's first choice more often than
the drafter's probability says. So trees rank the nodes of greedy requests by sharpened logits.
"""

# mypy: disable-error-code="no-untyped-def"
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from vllm.v1.worker.gpu.sample.gumbel import _log1p_neg_stable, murmur3_uniform32, murmur3_uniform64

from vllm_crossspec.drafting.flashhead.kernels import NO_CANDIDATE, SLOTS, pack

BLOCK = 1024


class NoiseKeys(NamedTuple):
    """The keys of the target's noise for the drafted tokens.

    Attributes:
        idx_mapping: int [rows / n] slot of every n consecutive rows; negative entries are padding.
        positions: int64 [rows] position of the token before the drafted one.
        temperature, seeds: float32 and int64 [S] of every slot.
        use_fp64: whether the target samples with float64 noise.
        sharpness: factor of the logits in rows without noise (greedy requests, padding), for the order of tree nodes.
        offsets: int64 [vocabulary] target id minus draft id; None if the vocabularies are the same.
    """

    idx_mapping: torch.Tensor
    positions: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    use_fp64: bool = False
    sharpness: float = 1.0
    offsets: torch.Tensor | None = None

    @property
    def arguments(self) -> tuple[torch.Tensor | None, ...]:
        """Last arguments of the kernels below."""
        return self.offsets, self.idx_mapping, self.positions, self.temperature, self.seeds

    def constants(self, num_rows: int) -> dict[str, int | bool]:
        """Constants of a launch over all rows."""
        return {"ROWS_PER_ENTRY": num_rows // len(self.idx_mapping), "USE_FP64": self.use_fp64}


@triton.jit
def _request(row, idx_mapping_ptr, temperature_ptr, ROWS_PER_ENTRY: tl.constexpr):
    """Slot and temperature (0 for padding) of a row's request."""
    slot = tl.load(idx_mapping_ptr + row // ROWS_PER_ENTRY).to(tl.int64)
    return slot, tl.load(temperature_ptr + slot, mask=slot >= 0, other=0.0).to(tl.float32)


@triton.jit
def _noise_of(token, inside, offsets_ptr, position_ptr, seed_ptr, USE_FP64: tl.constexpr):
    """The target's Gumbel noise for draft ids of a request at a position, computed as in vLLM's sampler."""
    seed, position, key = tl.load(seed_ptr), tl.load(position_ptr), token
    if offsets_ptr is not None:
        key = token + tl.load(offsets_ptr + token, mask=inside, other=0)
    if USE_FP64:
        u = murmur3_uniform64(seed, position, key)
        noise = (-tl.log(-tl.log(u))).to(tl.float32)
    else:
        u = murmur3_uniform32(seed, position, key)
        noise = -tl.log(-_log1p_neg_stable(u))
    return noise


@triton.jit
def coupled(
    x, token, inside, row, sharpness, offsets_ptr, idx_mapping_ptr, positions_ptr, temperature_ptr, seeds_ptr,
    ROWS_PER_ENTRY: tl.constexpr, USE_FP64: tl.constexpr,
):  # fmt: skip
    """Logits of a row: over the temperature plus the target's noise, or multiplied by ``sharpness`` without noise."""
    slot, temperature = _request(row, idx_mapping_ptr, temperature_ptr, ROWS_PER_ENTRY)
    if temperature != 0.0:
        x = x / temperature + _noise_of(token, inside, offsets_ptr, positions_ptr + row, seeds_ptr + slot, USE_FP64)
    else:
        x = x * sharpness
    return x


@triton.jit
def _add_target_noise_kernel(
    logits_ptr,  # [rows, vocabulary], the drafter's
    logits_stride,
    out_ptr,  # float32 [rows, vocabulary]
    out_stride,
    vocab_size,
    sharpness,  # factor of the logits in rows without noise
    offsets_ptr,  # int64 [vocabulary] target id - draft id, or None
    idx_mapping_ptr,  # int [rows / ROWS_PER_ENTRY]
    positions_ptr,  # int64 [rows]
    temperature_ptr,  # float32 [S]
    seeds_ptr,  # int64 [S]
    ROWS_PER_ENTRY: tl.constexpr,
    USE_FP64: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    x = tl.load(logits_ptr + row * logits_stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    x = coupled(
        x, token, inside, row, sharpness, offsets_ptr, idx_mapping_ptr, positions_ptr, temperature_ptr, seeds_ptr,
        ROWS_PER_ENTRY, USE_FP64,
    )  # fmt: skip
    tl.store(out_ptr + row * out_stride + token, x, mask=inside)


def add_target_noise(keys: NoiseKeys, logits: torch.Tensor) -> torch.Tensor:
    """float32 [rows, vocabulary]: the drafter's logits over temperature plus the target's noise; one launch.

    Rows without noise are multiplied by ``sharpness``. On a CPU a batch of only such rows needs no launch.
    """
    num_rows, vocab_size = logits.shape
    if not logits.is_cuda and not np.count_nonzero(keys.temperature.numpy()[keys.idx_mapping.numpy()]):
        return logits.float() if keys.sharpness == 1.0 else logits.float() * keys.sharpness
    out = torch.empty_like(logits, dtype=torch.float32)
    sizes = (logits, logits.stride(0), out, out.stride(0), vocab_size, keys.sharpness)
    grid = (num_rows, triton.cdiv(vocab_size, BLOCK))
    _add_target_noise_kernel[grid](*sizes, *keys.arguments, **keys.constants(num_rows), BLOCK=BLOCK)
    return out


@triton.jit
def _add_candidate_noise_kernel(
    scores_ptr,  # float32 [rows, N], changed
    tokens_ptr,  # int32 [rows, N] draft ids
    packed_ptr,  # int64 [rows, ceil(N / SLOTS)] out
    num_candidates,
    num_packed,
    sharpness,  # factor of the scores in rows without noise
    offsets_ptr,  # int64 [vocabulary] target id - draft id, or None
    idx_mapping_ptr,  # int [rows / ROWS_PER_ENTRY]
    positions_ptr,  # int64 [rows]
    temperature_ptr,  # float32 [S]
    seeds_ptr,  # int64 [S]
    ROWS_PER_ENTRY: tl.constexpr,
    USE_FP64: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot, temperature = _request(row, idx_mapping_ptr, temperature_ptr, ROWS_PER_ENTRY)
    is_sampled = temperature != 0.0
    if is_sampled | (sharpness != 1.0):
        p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
        n = p[:, None] * SLOTS + tl.arange(0, SLOTS)[None, :]
        inside = n < num_candidates
        place = row * num_candidates + n
        x = tl.load(scores_ptr + place, mask=inside, other=float("-inf"))
        token = tl.load(tokens_ptr + place, mask=inside, other=0).to(tl.int64)
        if is_sampled:  # -inf stays
            noise = _noise_of(token, inside, offsets_ptr, positions_ptr + row, seeds_ptr + slot, USE_FP64)
            x = x / temperature + noise
        else:
            x = x * sharpness
        tl.store(scores_ptr + place, x, mask=inside)
        best = tl.max(tl.where(x > float("-inf"), pack(x, token), NO_CANDIDATE), axis=1)
        tl.store(packed_ptr + row * num_packed + p, best, mask=p < num_packed)


def add_candidate_noise(keys: NoiseKeys, scores: torch.Tensor, tokens: torch.Tensor, packed: torch.Tensor) -> None:
    """As :func:`add_target_noise`, for the tokens that a FlashHead scored, in place; one launch.

    Args:
        keys: of the rows.
        scores: float32 [rows, N]; -inf stays.
        tokens: int [rows, N] draft ids.
        packed: int64 [rows, ceil(N / SLOTS)] of ``drafting.flashhead.kernels``, written again.
    """
    assert scores.is_contiguous() and tokens.is_contiguous() and packed.is_contiguous()
    (num_rows, num_packed), block = packed.shape, BLOCK // SLOTS
    sizes = (scores, tokens, packed, scores.shape[1], num_packed, keys.sharpness)
    grid, constants = (num_rows, triton.cdiv(num_packed, block)), keys.constants(num_rows)
    _add_candidate_noise_kernel[grid](*sizes, *keys.arguments, **constants, SLOTS=SLOTS, BLOCK_P=block)


@triton.jit
def _add_cluster_noise_kernel(
    scores_ptr,  # float32 [rows, C], changed
    lengths_ptr,  # float32 [C]
    members_ptr,  # int32 [C, M] draft ids
    num_clusters,
    offsets_ptr,  # int64 [vocabulary] target id - draft id, or None
    idx_mapping_ptr,  # int [rows / ROWS_PER_ENTRY]
    positions_ptr,  # int64 [rows]
    temperature_ptr,  # float32 [S]
    seeds_ptr,  # int64 [S]
    ROWS_PER_ENTRY: tl.constexpr,
    USE_FP64: tl.constexpr,
    CLUSTER_SIZE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot, temperature = _request(row, idx_mapping_ptr, temperature_ptr, ROWS_PER_ENTRY)
    if temperature != 0.0:
        c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        m = tl.arange(0, BLOCK_M)
        is_cluster = c < num_clusters
        is_member = is_cluster[:, None] & (m < CLUSTER_SIZE)[None, :]
        place = c.to(tl.int64)[:, None] * CLUSTER_SIZE + m[None, :]
        token = tl.load(members_ptr + place, mask=is_member, other=0).to(tl.int64)
        noise = _noise_of(token, is_member, offsets_ptr, positions_ptr + row, seeds_ptr + slot, USE_FP64)
        most = tl.max(tl.where(is_member, noise, float("-inf")), axis=1)
        score = tl.load(scores_ptr + row * num_clusters + c, mask=is_cluster, other=0.0)
        length = tl.load(lengths_ptr + c, mask=is_cluster, other=0.0)
        tl.store(scores_ptr + row * num_clusters + c, score * length / temperature + most, mask=is_cluster)


def add_cluster_noise(keys: NoiseKeys, scores: torch.Tensor, lengths: torch.Tensor, members: torch.Tensor) -> None:
    """Change the clusters' scores of sampled rows, so that the best P are drawn without replacement; one launch.

    They are drawn from the softmax of the states' products with the stored centroids, over the temperature (Gumbel
    top-P; Tranheden et al. 2026). A cluster's noise is the largest of its tokens' noise in the target, which is also
    Gumbel noise, plus a constant. Other rows stay.

    Args:
        keys: of the rows.
        scores: float32 [rows, C] products with normalised centroids, changed in place.
        lengths: float32 [C] of the stored centroids.
        members: int [C, M] draft ids.
    """
    assert scores.is_contiguous() and members.is_contiguous()
    (num_rows, num_clusters), size = scores.shape, members.shape[1]
    block_m = triton.next_power_of_2(size)
    block_c = triton.cdiv(BLOCK, block_m)
    blocks = {"CLUSTER_SIZE": size, "BLOCK_C": block_c, "BLOCK_M": block_m}
    grid, constants = (num_rows, triton.cdiv(num_clusters, block_c)), keys.constants(num_rows)
    _add_cluster_noise_kernel[grid](scores, lengths, members, num_clusters, *keys.arguments, **constants, **blocks)


# -- the same in plain PyTorch, for tests ------------------------------------------------------------------------------

_BITS = 0xFFFFFFFF


def _rotate(x: torch.Tensor, shift: int) -> torch.Tensor:
    return ((x << shift) | (x >> (32 - shift))) & _BITS


def _mix(h: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    key = (key * 0xCC9E2D51) & _BITS
    key = (_rotate(key, 15) * 0x1B873593) & _BITS
    return (_rotate(h ^ key, 13) * 5 + 0xE6546B64) & _BITS


def _hash(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor, domain: int = 0) -> torch.Tensor:
    """MurmurHash3 (32 bit) of (seed, position, token) in int64: [rows, 1], [rows, 1], [vocabulary] -> [rows, V]."""
    h = torch.full_like(seeds, domain)
    for key in (seeds & _BITS, (seeds >> 32) & _BITS, positions & _BITS, tokens & _BITS):
        h = _mix(h, key)
    h = h ^ 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _BITS
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _BITS
    return h ^ (h >> 16)


def gumbel_noise_naive(
    seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor, use_fp64: bool = False
) -> torch.Tensor:
    """The Gumbel noise of vLLM's sampler in plain PyTorch, float32 [rows, vocabulary or n], or float64.

    Args:
        seeds: int64 [rows].
        positions: int64 [rows] of the token before the sampled one.
        tokens: int64 [vocabulary] target ids, or [rows, n] of each row.
        use_fp64: whether the uniforms have 53 bits.
    """
    seeds, positions = seeds.long()[:, None], positions.long()[:, None]
    bits = _hash(seeds, positions, tokens)
    if use_fp64:
        high = _hash(seeds, positions, tokens, domain=0x9E3779B9)
        uniform = (((high << 32) | bits) >> 11 & ((1 << 53) - 1)).double().add_(0.5) * 2.0**-53
        return -torch.log(-torch.log(uniform.clamp_(max=1.0 - 2.0**-53)))
    # Summed in float32 as in vLLM; the logarithm is more precise than vLLM's series, whose error is 6e-7.
    uniform = (bits >> 16).float() * 2.0**-16 + ((bits & 0xFFFF).float() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform.double().clamp_(max=1.0 - 2.0**-24))).float()


def _sampled(
    keys: NoiseKeys, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Each row's temperature (0 for padding), the rows with noise, and a function of draft ids to their noise."""
    slots = keys.idx_mapping.repeat_interleave(num_rows // len(keys.idx_mapping))
    scale = torch.where(slots >= 0, keys.temperature[slots.clamp(min=0)].float(), 0.0)
    rows = scale.nonzero().flatten()

    def noise(tokens: torch.Tensor) -> torch.Tensor:
        ids = tokens.long()
        ids = ids if keys.offsets is None else ids + keys.offsets[ids]
        return gumbel_noise_naive(keys.seeds[slots[rows]], keys.positions[rows], ids, keys.use_fp64).float()

    return scale[:, None], rows, noise


def add_target_noise_naive(keys: NoiseKeys, logits: torch.Tensor) -> torch.Tensor:
    """As :func:`add_target_noise`."""
    out = logits.float() * keys.sharpness
    scale, rows, noise = _sampled(keys, len(logits))
    if rows.numel():
        out[rows] = logits[rows].float() / scale[rows] + noise(torch.arange(logits.shape[1], device=logits.device))
    return out


def add_candidate_noise_naive(keys: NoiseKeys, scores: torch.Tensor, tokens: torch.Tensor) -> None:
    """As :func:`add_candidate_noise`, without ``packed``."""
    scale, rows, noise = _sampled(keys, len(scores))
    if keys.sharpness != 1.0:
        scores[scale[:, 0] == 0] *= keys.sharpness
    if rows.numel():
        scores[rows] = scores[rows] / scale[rows] + noise(tokens[rows])


def add_cluster_noise_naive(
    keys: NoiseKeys, scores: torch.Tensor, lengths: torch.Tensor, members: torch.Tensor
) -> None:
    """As :func:`add_cluster_noise`."""
    scale, rows, noise = _sampled(keys, len(scores))
    if rows.numel():
        most = noise(members.flatten()).view(len(rows), *members.shape).amax(dim=2)
        scores[rows] = scores[rows] * lengths / scale[rows] + most
