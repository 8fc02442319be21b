"""Coupled drafts: a drafter ranks its candidates with the noise that the target will sample with.

vLLM samples by the Gumbel-max trick with noise keyed by (seed, position, token). Under sample-and-match the text does
not depend on the drafts, so a drafter may look at that noise: its best candidate by ``logits / temperature + noise`` is
the token that the target is likeliest to *sample*. No draft probabilities are kept, and trees work alike.

A greedy request has no noise, and its target takes the likeliest token, which the drafter's own first choice is more
often than the probability says that the drafter gives it. So trees rank nodes by sharpened logits there.
"""

# mypy: disable-error-code="no-untyped-def"
import numpy as np
import torch
import triton
import triton.language as tl
from vllm.v1.worker.gpu.sample.gumbel import _log1p_neg_stable, murmur3_uniform32, murmur3_uniform64

from vllm_crossspec.heads.flashhead.kernels import NO_CANDIDATE, SLOTS, pack
from vllm_crossspec.twins import runs_kernels

BLOCK = 1024


@triton.jit
def _gumbel(seed, position, key, USE_FP64: tl.constexpr):
    # The very expressions of vLLM's sampler, so that the draft sees the very numbers.
    if USE_FP64:
        u = murmur3_uniform64(seed, position, key)
        noise = (-tl.log(-tl.log(u))).to(tl.float32)
    else:
        u = murmur3_uniform32(seed, position, key)
        noise = -tl.log(-_log1p_neg_stable(u))
    return noise


@triton.jit
def _noise_of(token, inside, offsets_ptr, seed, position, USE_FP64: tl.constexpr):
    """The target's own Gumbel noise for draft ids of a request at a position."""
    key = token
    if offsets_ptr is not None:
        key = token + tl.load(offsets_ptr + token, mask=inside, other=0)
    return _gumbel(seed, position, key, USE_FP64)


@triton.jit
def _add_target_noise_kernel(
    logits_ptr,  # [rows, vocabulary], the drafter's
    logits_stride,
    out_ptr,  # float32 [rows, vocabulary]
    out_stride,
    offsets_ptr,  # int64 [vocabulary] target id - draft id, or None
    idx_mapping_ptr,  # int [rows / ROWS_PER_ENTRY]
    positions_ptr,  # int64 [rows]
    temperature_ptr,  # float32 [S]
    seeds_ptr,  # int64 [S]
    vocab_size,
    sharpness,  # factor of the logits in rows without noise
    ROWS_PER_ENTRY: tl.constexpr,
    USE_FP64: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    x = tl.load(logits_ptr + row * logits_stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    slot = tl.load(idx_mapping_ptr + row // ROWS_PER_ENTRY).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot, mask=slot >= 0, other=0.0).to(tl.float32)
    if temperature != 0.0:
        seed = tl.load(seeds_ptr + slot)
        position = tl.load(positions_ptr + row)
        x = x / temperature + _noise_of(token, inside, offsets_ptr, seed, position, USE_FP64)
    else:
        x = x * sharpness
    tl.store(out_ptr + row * out_stride + token, x, mask=inside)


def add_target_noise(
    logits: torch.Tensor,
    *,
    offsets: torch.Tensor | None,
    idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    use_fp64: bool = False,
    sharpness: float = 1.0,
) -> torch.Tensor:
    """A drafter's logits as the target's sampler will look at its own: over temperature, plus the noise; one launch.

    Rows of greedy requests (temperature 0) and of padding come out times ``sharpness``; without a GPU, where looking at
    the temperatures costs little, a batch of nothing else is not copied where that is 1.

    Args:
        logits: [rows, vocabulary] of the drafter.
        offsets: int64 [vocabulary] target id minus draft id; None where the drafter has the target's vocabulary.
        idx_mapping: int [rows / n] slot of every n consecutive rows; negative entries are padding.
        positions: int64 [rows] position of the token before the one that is drafted: the sampler's key.
        temperature: float32 [S].
        seeds: int64 [S].
        use_fp64: whether the target samples with float64 noise.
        sharpness: factor of the logits in rows without noise.

    Returns:
        float32 [rows, vocabulary].
    """
    num_rows, vocab_size = logits.shape
    rows_per_entry = num_rows // idx_mapping.shape[0]
    if not logits.is_cuda:
        if _is_greedy(idx_mapping, temperature):
            return logits.float() if sharpness == 1.0 else logits.float() * sharpness
        if not runs_kernels():
            slots = idx_mapping.repeat_interleave(rows_per_entry)
            return add_target_noise_naive(logits, offsets, slots, positions, temperature, seeds, use_fp64, sharpness)
    out = torch.empty_like(logits, dtype=torch.float32)
    _add_target_noise_kernel[(num_rows, triton.cdiv(vocab_size, BLOCK))](
        logits,
        logits.stride(0),
        out,
        out.stride(0),
        offsets,
        idx_mapping,
        positions,
        temperature,
        seeds,
        vocab_size,
        sharpness,
        ROWS_PER_ENTRY=rows_per_entry,
        USE_FP64=use_fp64,
        BLOCK=BLOCK,
    )
    return out


def _is_greedy(idx_mapping: torch.Tensor, temperature: torch.Tensor) -> bool:
    """Whether no row of a batch gets any noise, on a CPU; padding may be taken for a row that does."""
    return not np.count_nonzero(temperature.numpy()[idx_mapping.numpy()])


@triton.jit
def _add_candidate_noise_kernel(
    scores_ptr,  # float32 [rows, N], changed
    tokens_ptr,  # int32 [rows, N] draft ids
    packed_ptr,  # int64 [rows, ceil(N / SLOTS)] out
    offsets_ptr,  # int64 [vocabulary] target id - draft id, or None
    idx_mapping_ptr,  # int [rows / ROWS_PER_ENTRY]
    positions_ptr,  # int64 [rows]
    temperature_ptr,  # float32 [S]
    seeds_ptr,  # int64 [S]
    num_candidates,
    num_packed,
    sharpness,  # factor of the scores in rows without noise
    ROWS_PER_ENTRY: tl.constexpr,
    USE_FP64: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(idx_mapping_ptr + row // ROWS_PER_ENTRY).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot, mask=slot >= 0, other=0.0).to(tl.float32)
    is_sampled = temperature != 0.0
    if is_sampled | (sharpness != 1.0):
        p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
        n = p[:, None] * SLOTS + tl.arange(0, SLOTS)[None, :]
        inside = n < num_candidates
        place = row * num_candidates + n
        x = tl.load(scores_ptr + place, mask=inside, other=float("-inf"))
        token = tl.load(tokens_ptr + place, mask=inside, other=0).to(tl.int64)
        if is_sampled:  # one that is no candidate stays at -inf
            seed, position = tl.load(seeds_ptr + slot), tl.load(positions_ptr + row)
            x = x / temperature + _noise_of(token, inside, offsets_ptr, seed, position, USE_FP64)
        else:
            x = x * sharpness
        tl.store(scores_ptr + place, x, mask=inside)
        best = tl.max(tl.where(x > float("-inf"), pack(x, token), NO_CANDIDATE), axis=1)
        tl.store(packed_ptr + row * num_packed + p, best, mask=p < num_packed)


def add_candidate_noise(
    scores: torch.Tensor,
    tokens: torch.Tensor,
    packed: torch.Tensor | None,
    *,
    offsets: torch.Tensor | None,
    idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    use_fp64: bool = False,
    sharpness: float = 1.0,
) -> None:
    """:func:`add_target_noise` for the few tokens that a FlashHead scored, in place; one launch.

    Args:
        scores: float32 [rows, N]; -inf for one that is no candidate, which it stays.
        tokens: int [rows, N] draft ids.
        packed: int64 [rows, ceil(N / SLOTS)] of ``heads.flashhead.kernels``, the best of every SLOTS candidates,
            written anew; None for the head of PyTorch operations, which has none. The others are
            :func:`add_target_noise`'s.
    """
    num_rows, num_candidates = scores.shape
    rows_per_entry = num_rows // idx_mapping.shape[0]
    if packed is None:
        slots = idx_mapping.repeat_interleave(rows_per_entry)
        add_candidate_noise_naive(scores, tokens, offsets, slots, positions, temperature, seeds, use_fp64, sharpness)
        return
    assert scores.is_contiguous() and tokens.is_contiguous() and packed.is_contiguous()
    blocks = triton.cdiv(packed.shape[1], BLOCK // SLOTS)
    _add_candidate_noise_kernel[(num_rows, blocks)](
        scores,
        tokens,
        packed,
        offsets,
        idx_mapping,
        positions,
        temperature,
        seeds,
        num_candidates,
        packed.shape[1],
        sharpness,
        ROWS_PER_ENTRY=rows_per_entry,
        USE_FP64=use_fp64,
        SLOTS=SLOTS,
        BLOCK_P=BLOCK // SLOTS,
    )


@triton.jit
def _add_cluster_noise_kernel(
    scores_ptr,  # float32 [rows, C], changed
    lengths_ptr,  # float32 [C]
    members_ptr,  # int32 [C, M] draft ids
    offsets_ptr,  # int64 [vocabulary] target id - draft id, or None
    idx_mapping_ptr,  # int [rows / ROWS_PER_ENTRY]
    positions_ptr,  # int64 [rows]
    temperature_ptr,  # float32 [S]
    seeds_ptr,  # int64 [S]
    num_clusters,
    ROWS_PER_ENTRY: tl.constexpr,
    USE_FP64: tl.constexpr,
    CLUSTER_SIZE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(idx_mapping_ptr + row // ROWS_PER_ENTRY).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot, mask=slot >= 0, other=0.0).to(tl.float32)
    if temperature != 0.0:
        c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        m = tl.arange(0, BLOCK_M)
        is_cluster = c < num_clusters
        is_member = is_cluster[:, None] & (m < CLUSTER_SIZE)[None, :]
        place = c.to(tl.int64)[:, None] * CLUSTER_SIZE + m[None, :]
        token = tl.load(members_ptr + place, mask=is_member, other=0).to(tl.int64)
        seed, position = tl.load(seeds_ptr + slot), tl.load(positions_ptr + row)
        noise = _noise_of(token, is_member, offsets_ptr, seed, position, USE_FP64)
        most = tl.max(tl.where(is_member, noise, float("-inf")), axis=1)
        score = tl.load(scores_ptr + row * num_clusters + c, mask=is_cluster, other=0.0)
        length = tl.load(lengths_ptr + c, mask=is_cluster, other=0.0)
        tl.store(scores_ptr + row * num_clusters + c, score * length / temperature + most, mask=is_cluster)


def add_cluster_noise(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    members: torch.Tensor,
    uses_kernels: bool,
    *,
    offsets: torch.Tensor | None,
    idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    use_fp64: bool = False,
) -> None:
    """Make the best P clusters of sampled rows P that are drawn without replacement, in place; one launch.

    They are drawn from the softmax of the states' products with the stored centroids over the temperature (Gumbel
    top-P; Tranheden et al. 2026, as the thesis's section 2.5 has it). The noise of a cluster is the most that the
    target's own gives any of its tokens: of M tokens that is Gumbel noise, too, but for a constant.

    Args:
        scores: float32 [rows, C] products with centroids of length 1.
        lengths: float32 [C] of the stored ones.
        members: int [C, M] draft ids.
        uses_kernels: if not, PyTorch operations do it. The others are :func:`add_target_noise`'s.
    """
    (num_rows, num_clusters), size = scores.shape, members.shape[1]
    rows_per_entry = num_rows // idx_mapping.shape[0]
    if not uses_kernels:
        slots = idx_mapping.repeat_interleave(rows_per_entry)
        add_cluster_noise_naive(scores, lengths, members, offsets, slots, positions, temperature, seeds, use_fp64)
        return
    assert scores.is_contiguous() and members.is_contiguous()
    block_m = triton.next_power_of_2(size)
    block_c = triton.cdiv(BLOCK, block_m)
    _add_cluster_noise_kernel[(num_rows, triton.cdiv(num_clusters, block_c))](
        scores,
        lengths,
        members,
        offsets,
        idx_mapping,
        positions,
        temperature,
        seeds,
        num_clusters,
        ROWS_PER_ENTRY=rows_per_entry,
        USE_FP64=use_fp64,
        CLUSTER_SIZE=size,
        BLOCK_C=block_c,
        BLOCK_M=block_m,
    )


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
    """The Gumbel noise of vLLM's sampler in plain PyTorch.

    Args:
        seeds: int64 [rows].
        positions: int64 [rows] of the token before the sampled one.
        tokens: int64 [vocabulary] ids that the noise is keyed by, or [rows, n] of each row's own.
        use_fp64: whether the uniforms have 53 bits.

    Returns:
        float32 [rows, vocabulary or n], or float64.
    """
    seeds, positions = seeds.long()[:, None], positions.long()[:, None]
    bits = _hash(seeds, positions, tokens)
    if use_fp64:
        high = _hash(seeds, positions, tokens, domain=0x9E3779B9)
        uniform = (((high << 32) | bits) >> 11 & ((1 << 53) - 1)).double().add_(0.5) * 2.0**-53
        return -torch.log(-torch.log(uniform.clamp_(max=1.0 - 2.0**-53)))
    # As vLLM adds it up in float32; the logarithm is taken more finely than its series, which is good to 6e-7.
    uniform = (bits >> 16).float() * 2.0**-16 + ((bits & 0xFFFF).float() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform.double().clamp_(max=1.0 - 2.0**-24))).float()


def add_target_noise_naive(
    logits: torch.Tensor,
    offsets: torch.Tensor | None,
    slots: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    use_fp64: bool = False,
    sharpness: float = 1.0,
) -> torch.Tensor:
    """:func:`add_target_noise` in plain PyTorch: the kernel's twin, and what runs where kernels are interpreted.

    There a kernel over the whole vocabulary of every node is what a round would spend its time on.

    Args:
        slots: int [rows]; negative entries are padding. The others are :func:`add_target_noise`'s.
    """
    out = logits.float() * sharpness
    scale = torch.where(slots >= 0, temperature[slots.clamp(min=0)].float(), 0.0)
    rows = scale.nonzero().flatten()
    if rows.numel():
        tokens = torch.arange(logits.shape[1], device=logits.device)
        keys = tokens if offsets is None else tokens + offsets
        noise = gumbel_noise_naive(seeds[slots[rows]], positions[rows], keys, use_fp64)
        out[rows] = logits[rows].float() / scale[rows, None] + noise.float()
    return out


def add_candidate_noise_naive(
    scores: torch.Tensor,
    tokens: torch.Tensor,
    offsets: torch.Tensor | None,
    slots: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    use_fp64: bool = False,
    sharpness: float = 1.0,
) -> None:
    """:func:`add_candidate_noise` in plain PyTorch, but for ``packed``: the kernel's twin, and what runs without a GPU.

    Args:
        slots: int [rows]; negative entries are padding. The others are :func:`add_candidate_noise`'s.
    """
    scale = torch.where(slots >= 0, temperature[slots.clamp(min=0)].float(), 0.0)
    rows = scale.nonzero().flatten()
    if sharpness != 1.0:
        scores[scale == 0] *= sharpness
    if rows.numel():
        ids = tokens[rows].long()
        keys = ids if offsets is None else ids + offsets[ids]
        noise = gumbel_noise_naive(seeds[slots[rows]], positions[rows], keys, use_fp64)
        scores[rows] = scores[rows] / scale[rows, None] + noise.float()


def add_cluster_noise_naive(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    members: torch.Tensor,
    offsets: torch.Tensor | None,
    slots: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    use_fp64: bool = False,
) -> None:
    """:func:`add_cluster_noise` in plain PyTorch: the kernel's twin, and what runs without a GPU.

    Args:
        slots: int [rows]; negative entries are padding. The others are :func:`add_cluster_noise`'s.
    """
    scale = torch.where(slots >= 0, temperature[slots.clamp(min=0)].float(), 0.0)
    rows = scale.nonzero().flatten()
    if rows.numel():
        ids = members.flatten().long()
        keys = ids if offsets is None else ids + offsets[ids]
        noise = gumbel_noise_naive(seeds[slots[rows]], positions[rows], keys, use_fp64).float()
        most = noise.view(len(rows), *members.shape).amax(dim=2)
        scores[rows] = scores[rows] * lengths / scale[rows, None] + most
