"""FlashHead on a GPU: four launches for the best token of every row, five for the best K. Shapes: the folder's legend.

Full logits are never stored. A program writes the best of its tokens as one packed number: score, then token. The
smaller token wins ties, as in ``torch.argmax``. Only the best K need the scores of all candidates. Drafts coupled with
the target's noise take one more launch, by the caller.
"""

# mypy: disable-error-code="no-untyped-def"
from typing import NamedTuple

import torch
import triton
import triton.language as tl

SLOTS = 32
"""Candidates that one program scores."""
ROWS_TOGETHER = 16
"""States for which one program scores its centroids."""
CHUNK = 2048
"""Candidates from which one program picks the best K."""
NO_CANDIDATE = tl.constexpr(-(2**63))
"""A packed number lower than every candidate's."""
_LOW = tl.constexpr(0xFFFFFFFF)
_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.bfloat16,  # holds every number of it
}


class Buffers(NamedTuple):
    """Persistent buffers between the launches. Rows: most rows of a batch.

    Attributes:
        scores: float32 [rows, C] of centroids.
        clusters: int32 [rows, P], the probed ones, ascending.
        packed: int64 [rows, ceil(N / SLOTS)], the best candidate of each program.
        candidate_scores, candidate_tokens: float32 and int32 [rows, N]; of width 0 if they are not kept.
        chunk_best: int64 [rows, chunks * K], the best K of each chunk.
        chunk_sums: float32 [rows, chunks, 2], each chunk's maximum and sum of exponentials.
    """

    scores: torch.Tensor
    clusters: torch.Tensor
    packed: torch.Tensor
    candidate_scores: torch.Tensor
    candidate_tokens: torch.Tensor
    chunk_best: torch.Tensor
    chunk_sums: torch.Tensor


def make_buffers(rows: int, tokens: "Tokens", num_probes: int, top_k: int, keeps_all: bool) -> Buffers:
    """Buffers for at most ``rows`` hidden states. ``keeps_all``: whether to keep all candidates' scores without K."""
    (num_clusters, size), device = tokens.members.shape, tokens.members.device
    num_candidates = num_probes * size + len(tokens.special_tokens)
    width = num_candidates if top_k or keeps_all else 0
    chunks = triton.cdiv(width, CHUNK) if top_k else 0

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return Buffers(
        scores=empty(rows, num_clusters, dtype=torch.float32),
        clusters=empty(rows, num_probes, dtype=torch.int32),
        packed=empty(rows, triton.cdiv(num_candidates, SLOTS), dtype=torch.int64),
        candidate_scores=empty(rows, width, dtype=torch.float32),
        candidate_tokens=empty(rows, width, dtype=torch.int32),
        chunk_best=empty(rows, chunks * top_k, dtype=torch.int64),
        chunk_sums=empty(rows, chunks, 2, dtype=torch.float32),
    )


@triton.jit
def _key(score):
    """int32 with the order of float32 scores."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # + 0.0: the two zeros are equal
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def pack(score, token):
    """One int64 ordered by float32 score, then by falling token."""
    return (_key(score).to(tl.int64) << 32) | (_LOW - token.to(tl.int64))


@triton.jit
def _unpack_token(packed):
    return _LOW - (packed & _LOW)


@triton.jit
def _unpack_score(packed):
    key = (packed >> 32).to(tl.int32)
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_rows"])
def _score_centroids_kernel(
    hidden_ptr,  # float [B, D]
    hidden_stride,
    centroids_ptr,  # float [C, D], of length 1 once they are multiplied by their scales
    scales_ptr,  # float32 [C], or None for centroids of length 1
    scores_ptr,  # float32 [rows, C] out
    num_rows,
    num_clusters,
    hidden_size,
    IS_ONE_ROW: tl.constexpr,
    STATES: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_cluster = c < num_clusters
    b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    is_row = b < num_rows
    total = tl.zeros([BLOCK_B, BLOCK_C], tl.float32)
    for start in range(0, hidden_size, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        is_column = d < hidden_size
        place = c.to(tl.int64)[:, None] * hidden_size + d[None, :]
        rows = tl.load(centroids_ptr + place, mask=is_cluster[:, None] & is_column[None, :], other=0.0)
        place = b.to(tl.int64)[:, None] * hidden_stride + d[None, :]
        states = tl.load(hidden_ptr + place, mask=is_row[:, None] & is_column[None, :], other=0.0)
        if IS_ONE_ROW:
            total += tl.sum(rows.to(tl.float32) * states.to(tl.float32), axis=1)[None, :]
        else:
            states = states.to(STATES).to(OPERAND)
            total += tl.dot(states, tl.trans(rows.to(OPERAND)), input_precision="ieee")
    if scales_ptr is not None:
        total *= tl.load(scales_ptr + c, mask=is_cluster, other=0.0)[None, :]
    target = b.to(tl.int64)[:, None] * num_clusters + c[None, :]
    tl.store(scores_ptr + target, total, mask=is_row[:, None] & is_cluster[None, :])


def score_centroids(
    *, hidden: torch.Tensor, centroids: torch.Tensor, scores: torch.Tensor, scales: torch.Tensor | None = None
) -> None:
    """Compute inner products of states and centroids; one launch.

    Args:
        hidden: float [B, D], rows contiguous.
        centroids: float [C, D], normalised, of any precision.
        scores: float32 [at least B, C], written.
        scales: float32 [C] factor of each centroid, for narrow formats; None: 1.
    """
    (num_rows, hidden_size), num_clusters = hidden.shape, len(centroids)
    assert hidden.stride(1) == 1 and centroids.is_contiguous() and scores.is_contiguous()
    is_one, block_c = num_rows == 1, 32
    block_b = 1 if is_one else ROWS_TOGETHER
    grid, tensors = (triton.cdiv(num_clusters, block_c), triton.cdiv(num_rows, block_b)), (centroids, scales, scores)
    states = _TYPES[centroids.dtype]
    # The interpreter multiplies the bits of bfloat16 as if they were numbers.
    types = {"STATES": states, "OPERAND": states if centroids.is_cuda else tl.float32}
    blocks = {"IS_ONE_ROW": is_one, "BLOCK_B": block_b, "BLOCK_C": block_c, "BLOCK_D": 128 if is_one else 64}
    _score_centroids_kernel[grid](
        hidden, hidden.stride(0), *tensors, num_rows, num_clusters, hidden_size, **types, **blocks
    )


@triton.jit
def _select_clusters_kernel(
    scores_ptr,  # float32 [rows, C]
    clusters_ptr,  # int32 [rows, P] out
    num_clusters,
    NUM_PROBES: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    is_cluster = c < num_clusters
    score = tl.load(scores_ptr + row * num_clusters + c, mask=is_cluster, other=float("-inf"))
    # Past the clusters: a key that no float has.
    key = tl.where(is_cluster, _key(tl.where(score == score, score, float("-inf"))), -2147483648)
    # Find the P-th best key bit by bit: the highest number that P keys reach.
    reached = tl.sum((key >= 0).to(tl.int32), axis=0) >= NUM_PROBES
    threshold = tl.where(reached, 0, -2147483648)
    for bit in tl.static_range(31):
        higher = threshold + (1 << (30 - bit))
        reached = tl.sum((key >= higher).to(tl.int32), axis=0) >= NUM_PROBES
        threshold = tl.where(reached, higher, threshold)
    is_above = key > threshold
    is_tie = key == threshold
    # The first clusters win ties for the last places.
    free = NUM_PROBES - tl.sum(is_above.to(tl.int32), axis=0)
    is_tie = is_tie & (tl.cumsum(is_tie.to(tl.int32), axis=0) <= free)
    is_probed = (is_above | is_tie) & is_cluster
    place = tl.cumsum(is_probed.to(tl.int32), axis=0) - 1
    tl.store(clusters_ptr + row * NUM_PROBES + place, c, mask=is_probed)


def select_clusters(*, scores: torch.Tensor, clusters: torch.Tensor) -> None:
    """Write the P best clusters, which are probed; one launch.

    Args:
        scores: float32 [B, C]; NaN is the lowest.
        clusters: int32 [at least B, P], written, ascending.
    """
    (num_rows, num_clusters), num_probes = scores.shape, clusters.shape[1]
    assert scores.is_contiguous() and clusters.is_contiguous() and num_probes <= num_clusters
    block = triton.next_power_of_2(num_clusters)
    _select_clusters_kernel[(num_rows,)](
        scores, clusters, num_clusters, NUM_PROBES=num_probes, BLOCK_C=block, num_warps=16 if block > 4096 else 4
    )


@triton.jit(do_not_specialize=["first_token", "num_weights"])
def _score_tokens_kernel(
    hidden_ptr,  # float [B, D]
    hidden_stride,
    weight_ptr,  # float [rows of the weight, D], by token, or by place among the members where IS_GROUPED
    clusters_ptr,  # int32 [rows, P]
    members_ptr,  # int32 [C, M]
    special_tokens_ptr,  # int32 [S]
    special_places_ptr,  # int32 [S], where members has each
    packed_ptr,  # int64 [rows, ceil(N / SLOTS)] out
    scores_ptr,  # float32 [rows, N] out where KEEPS_ALL
    tokens_ptr,  # int32 [rows, N] out where KEEPS_ALL
    first_token,  # of the weight's rows
    num_weights,
    hidden_size,
    NUM_PROBES: tl.constexpr,
    CLUSTER_SIZE: tl.constexpr,
    NUM_SPECIAL: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    IS_SHARD: tl.constexpr,
    KEEPS_ALL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    num_members: tl.constexpr = NUM_PROBES * CLUSTER_SIZE
    is_member = n < num_members
    is_live = is_member
    cluster = tl.load(clusters_ptr + row * NUM_PROBES + n // CLUSTER_SIZE, mask=is_live, other=0)
    place = cluster * CLUSTER_SIZE + n % CLUSTER_SIZE
    token = tl.load(members_ptr + place, mask=is_live, other=0)
    if NUM_SPECIAL > 0:
        is_special = (n >= num_members) & (n < num_members + NUM_SPECIAL)
        special = tl.where(is_special, n - num_members, 0)
        place = tl.where(is_special, tl.load(special_places_ptr + special, mask=is_special, other=0), place)
        token = tl.where(is_special, tl.load(special_tokens_ptr + special, mask=is_special, other=0), token)
        if KEEPS_ALL:
            # A special token in a probed cluster is already scored.
            for start in range(0, NUM_PROBES, BLOCK_P):
                p = start + tl.arange(0, BLOCK_P)
                probed = tl.load(clusters_ptr + row * NUM_PROBES + p, mask=p < NUM_PROBES, other=-1)
                is_same = (probed[None, :] == (place // CLUSTER_SIZE)[:, None]).to(tl.int32)
                is_special = is_special & (tl.sum(is_same, axis=1) == 0)
        is_live = is_live | is_special
    source = place if IS_GROUPED else token
    if IS_SHARD:
        source = source - first_token
        is_live = is_live & (source >= 0) & (source < num_weights)
    source = source.to(tl.int64) * hidden_size
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, hidden_size, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        is_column = d < hidden_size
        state = tl.load(hidden_ptr + row * hidden_stride + d, mask=is_column, other=0.0).to(tl.float32)
        mask = is_live[:, None] & is_column[None, :]
        rows = tl.load(weight_ptr + source[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(rows * state[None, :], axis=1)
    is_live = is_live & (total == total)
    packed = tl.where(is_live, pack(total, token), NO_CANDIDATE)
    tl.store(packed_ptr + row * tl.num_programs(0) + tl.program_id(0), tl.max(packed, axis=0))
    if KEEPS_ALL:
        inside = n < num_members + NUM_SPECIAL
        target = row * (num_members + NUM_SPECIAL) + n
        tl.store(scores_ptr + target, tl.where(is_live, total, float("-inf")), mask=inside)
        tl.store(tokens_ptr + target, tl.where(is_live, token, 0), mask=inside)


class Tokens(NamedTuple):
    """The clusters' tokens and their rows.

    Attributes:
        weight: float [V, D], rows by token, or by place in ``members`` if ``is_grouped``. A rank has only its rows.
        members: int32 [C, M].
        special_tokens, special_places: int32 [S], and the place of each in ``members``.
        is_grouped: whether the rows of a cluster are adjacent.
        first_token: the token of the weight's first row; None: the weight has all tokens.
    """

    weight: torch.Tensor
    members: torch.Tensor
    special_tokens: torch.Tensor
    special_places: torch.Tensor
    is_grouped: bool
    first_token: int | None = None


def score_tokens(*, hidden: torch.Tensor, tokens: Tokens, buffers: Buffers, keeps_all: bool) -> None:
    """Score the tokens of the probed clusters and the special ones; one launch.

    Args:
        hidden: float [B, D], rows contiguous.
        tokens: the output embedding and its clusters.
        buffers: ``clusters`` is read, ``packed`` is written.
        keeps_all: whether to write all candidates' scores and ids too: -inf and 0 for duplicates and other ranks'.
    """
    (num_rows, hidden_size), num_probes = hidden.shape, buffers.clusters.shape[1]
    assert hidden.stride(1) == 1 and tokens.weight.is_contiguous() and tokens.members.is_contiguous()
    grid, num_special = (buffers.packed.shape[1], num_rows), len(tokens.special_tokens)
    places = (buffers.clusters, tokens.members, tokens.special_tokens, tokens.special_places)
    out = (buffers.packed, buffers.candidate_scores, buffers.candidate_tokens)
    rows = (tokens.first_token or 0, len(tokens.weight), hidden_size)
    sizes = {"NUM_PROBES": num_probes, "CLUSTER_SIZE": tokens.members.shape[1], "NUM_SPECIAL": num_special}
    kinds = {"IS_GROUPED": tokens.is_grouped, "IS_SHARD": tokens.first_token is not None, "KEEPS_ALL": keeps_all}
    blocks = {"BLOCK_N": SLOTS, "BLOCK_P": 64, "BLOCK_D": 128}
    _score_tokens_kernel[grid](
        hidden, hidden.stride(0), tokens.weight, *places, *out, *rows, **sizes, **kinds, **blocks
    )


@triton.jit
def _best_token_kernel(
    packed_ptr,  # int64 [rows, num_programs]
    out_ptr,  # int64 [B] out
    scores_ptr,  # float32 [B] out, or None
    num_programs,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    best = tl.full([BLOCK], NO_CANDIDATE, tl.int64)
    for start in range(0, num_programs, BLOCK):
        i = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(packed_ptr + row * num_programs + i, mask=i < num_programs, other=NO_CANDIDATE))
    winner = tl.max(best, axis=0)
    tl.store(out_ptr + row, tl.where(winner == NO_CANDIDATE, 0, _unpack_token(winner)))
    if scores_ptr is not None:
        tl.store(scores_ptr + row, tl.where(winner == NO_CANDIDATE, float("-inf"), _unpack_score(winner)))


def best_token(*, packed: torch.Tensor, out: torch.Tensor, scores: torch.Tensor | None = None) -> None:
    """Write the best token of all programs of :func:`score_tokens`; one launch.

    Args:
        packed: int64 [at least B, programs].
        out: int64 [B], written; 0 if all scores are NaN.
        scores: float32 [B], written if given; -inf if all scores are NaN.
    """
    assert packed.is_contiguous() and out.is_contiguous()
    _best_token_kernel[(len(out),)](packed, out, scores, packed.shape[1], BLOCK=256)


@triton.jit
def keep_best(score, token, chunk, best_ptr, sums_ptr, K: tl.constexpr):
    """Write a chunk's best K scores with their tokens, its maximum, and the sum of exponentials below it."""
    is_live = score > float("-inf")
    highest = tl.max(score, axis=0)
    total = tl.sum(tl.where(is_live, tl.exp(score - tl.where(highest > float("-inf"), highest, 0.0)), 0.0), axis=0)
    tl.store(sums_ptr + chunk * 2, highest)
    tl.store(sums_ptr + chunk * 2 + 1, total)
    packed = tl.where(is_live, pack(score, token), NO_CANDIDATE)
    for rank in range(K):
        best = tl.max(packed, axis=0)
        tl.store(best_ptr + chunk * K + rank, best)
        packed = tl.where(packed == best, NO_CANDIDATE, packed)


@triton.jit
def _chunk_best_kernel(
    scores_ptr,  # float32 [rows, N]
    tokens_ptr,  # int32 [rows, N]
    best_ptr,  # int64 [rows, chunks * K] out
    sums_ptr,  # float32 [rows, chunks, 2] out
    num_candidates,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < num_candidates
    score = tl.load(scores_ptr + row * num_candidates + n, mask=inside, other=float("-inf"))
    token = tl.load(tokens_ptr + row * num_candidates + n, mask=inside, other=0)
    keep_best(score, token, row * tl.num_programs(0) + tl.program_id(0), best_ptr, sums_ptr, K)


@triton.jit
def _top_tokens_kernel(
    best_ptr,  # int64 [rows, chunks * K]
    sums_ptr,  # float32 [rows, chunks, 2]
    tokens_ptr,  # int64 [B, K] out
    log_probs_ptr,  # float32 [B, K] out
    log_sums_ptr,  # float32 [B] out, or None
    offsets_ptr,  # int64 [draft vocabulary], or None: what is added to a token
    num_chunks,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    packed = tl.load(best_ptr + row * num_chunks * K + i, mask=i < num_chunks * K, other=NO_CANDIDATE)
    chunk = tl.arange(0, BLOCK_CHUNKS)
    sums = sums_ptr + (row * num_chunks + chunk) * 2
    highest = tl.load(sums, mask=chunk < num_chunks, other=float("-inf"))
    total = tl.load(sums + 1, mask=chunk < num_chunks, other=0.0)
    maximum = tl.max(highest, axis=0)
    maximum = tl.where(maximum > float("-inf"), maximum, 0.0)
    share = tl.sum(total * tl.exp(highest - maximum), axis=0)
    log_sum = tl.log(tl.where(share > 0, share, 1.0)) + maximum
    if log_sums_ptr is not None:
        tl.store(log_sums_ptr + row, tl.where(share > 0, log_sum, float("-inf")))
    for rank in range(K):
        best = tl.max(packed, axis=0)
        is_none = best == NO_CANDIDATE
        token = tl.where(is_none, 0, _unpack_token(best))
        if offsets_ptr is not None:
            token += tl.load(offsets_ptr + token)
        tl.store(tokens_ptr + row * K + rank, token)
        log_prob = tl.where(is_none, float("-inf"), _unpack_score(best) - log_sum)
        tl.store(log_probs_ptr + row * K + rank, log_prob)
        packed = tl.where(packed == best, NO_CANDIDATE, packed)


class TopTokens(NamedTuple):
    """The best candidates of each row, in falling order, smaller ids first at ties.

    Attributes:
        tokens: int64 [B, K]; 0 past the last candidate.
        log_probs: float32 [B, K]; -inf past the last candidate. They are normalised over the candidates, so FlashHead's
            are slightly too high.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor


def top_tokens(*, buffers: Buffers, out: TopTokens, log_sums: torch.Tensor | None = None) -> None:
    """Write the best K candidates of each row; two launches.

    Args:
        buffers: the candidates' are read, the chunks' written.
        out: written.
        log_sums: float32 [B], written if given: ``logsumexp`` of the row's scores.
    """
    (num_rows, k), num_candidates = out.tokens.shape, buffers.candidate_scores.shape[1]
    chunks = buffers.chunk_sums.shape[1]
    assert buffers.chunk_best.shape[1] == chunks * k
    candidates = (buffers.candidate_scores, buffers.candidate_tokens)
    of_chunks = (buffers.chunk_best, buffers.chunk_sums)
    _chunk_best_kernel[(chunks, num_rows)](*candidates, *of_chunks, num_candidates, K=k, BLOCK=CHUNK)
    join_chunks(*of_chunks, out, log_sums=log_sums)


def join_chunks(
    chunk_best: torch.Tensor,
    chunk_sums: torch.Tensor,
    out: TopTokens,
    *,
    log_sums: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> None:
    """Write the best K of all chunks of each row; one launch.

    Args:
        chunk_best: int64 [rows, chunks * K].
        chunk_sums: float32 [rows, chunks, 2].
        out: written.
        log_sums: float32 [B], written if given: ``logsumexp`` of the row's scores.
        offsets: int64 [draft vocabulary] target id minus draft id; None: tokens stay as they are.
    """
    (num_rows, k), chunks = out.tokens.shape, chunk_sums.shape[1]
    assert out.tokens.is_contiguous() and out.log_probs.is_contiguous()
    blocks = {"BLOCK": triton.next_power_of_2(chunks * k), "BLOCK_CHUNKS": triton.next_power_of_2(chunks)}
    _top_tokens_kernel[(num_rows,)](chunk_best, chunk_sums, *out, log_sums, offsets, chunks, K=k, **blocks)
