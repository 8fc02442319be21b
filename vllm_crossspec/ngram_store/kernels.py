"""Lookups in a store on a GPU: one launch answers a whole level of a draft tree, for every request."""

# mypy: disable-error-code="no-untyped-def"

import math

import torch
import triton
import triton.language as tl

from vllm_crossspec.kernel_args import next_power_of_2
from vllm_crossspec.ngram_store.store import FLOOR, NgramStore, check_backoff


@triton.jit
def _children(offsets_ptr, nodes, are_nodes, vocab_size, total):
    """Where the children of nodes begin and end, int64; nowhere for what is no node."""
    begin = tl.load(offsets_ptr + nodes, mask=are_nodes, other=0).to(tl.int64)
    end = tl.load(offsets_ptr + nodes + 1, mask=are_nodes, other=0).to(tl.int64)
    # A damaged file must not make the search leave the arrays.
    begin = tl.minimum(tl.maximum(begin, vocab_size), total)
    return begin, tl.where(are_nodes, tl.minimum(tl.maximum(end, vocab_size), total), begin)


@triton.jit
def _search(tokens_ptr, low, high, wanted, vocab_size, steps):
    """The node with a token among those from ``low`` to ``high``, by halving; -1 without such a node. Of one shape."""
    found = tl.zeros_like(low) - 1
    for _ in range(steps):
        middle = (low + high) // 2
        looks = low < high
        value = tl.load(tokens_ptr + middle - vocab_size, mask=looks, other=-1).to(tl.int64)
        found = tl.where(looks & (value == wanted), middle, found)
        low = tl.where(looks & (value < wanted), middle + 1, low)
        # Found: nothing is left to search.
        high = tl.where(looks & (value >= wanted), tl.where(value == wanted, low, middle), high)
    return found


@triton.jit
def _look_up_kernel(
    contexts_ptr,  # int [R * B, K]
    contexts_stride,
    candidates_ptr,  # int [R, B, C], any strides
    request_stride,
    beam_stride,
    candidate_stride,
    offsets_ptr,  # int32 or int64 [I + 1]
    tokens_ptr,  # int16 or int32 [N - V]
    codes_ptr,  # int16 or uint8 [N]
    log_probs_ptr,  # float32 [R, B, C] out
    matched_ptr,  # int8 [R, B, C] out, where HAS_MATCHED
    num_beams,
    num_candidates,
    vocab_size,
    num_inner,  # I
    total,  # N
    steps,  # halvings that end every search
    scale,
    floor,
    backoff,  # ln of the factor; 0 for the longest match
    LONGEST: tl.constexpr,  # context tokens in use
    LENGTHS: tl.constexpr,  # the power of two at or above it
    NONE: tl.constexpr,
    IS_BACKOFF: tl.constexpr,
    HAS_MATCHED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_candidates
    request, beam = row // num_beams, row % num_beams
    place = request * request_stride + beam * beam_stride + column.to(tl.int64) * candidate_stride
    wanted = tl.load(candidates_ptr + place, mask=inside, other=-1).to(tl.int64)

    # The context's suffixes of 1 .. LONGEST tokens side by side, each at the node of its first token.
    length = tl.arange(0, LENGTHS) + 1
    context_ptr = contexts_ptr + row * contexts_stride
    node = tl.load(context_ptr + (LONGEST - length), mask=length <= LONGEST, other=-1).to(tl.int64)
    node = tl.where((node >= 0) & (node < vocab_size), node, -1)
    present = 0
    for step in tl.static_range(1, LONGEST):
        # The suffix of l tokens goes on with its token number `step`; the shorter ones have arrived.
        goes_on = (length > step) & (length <= LONGEST)
        token = tl.load(context_ptr + (LONGEST - length + step), mask=goes_on, other=-1).to(tl.int64)
        walks = goes_on & (node >= 0) & (node < num_inner)
        begin, end = _children(offsets_ptr, node, walks, vocab_size, total)
        node = tl.where(goes_on, _search(tokens_ptr, begin, end, token, vocab_size, steps), node)

    # All candidates under all suffixes at once.
    open_nodes = (node >= 0) & (node < num_inner)
    begin, end = _children(offsets_ptr, node, open_nodes, vocab_size, total)
    begin = begin[:, None] + tl.zeros([LENGTHS, BLOCK], tl.int64)
    end = tl.where(inside[None, :], end[:, None], begin)
    found = _search(tokens_ptr, begin, end, wanted[None, :], vocab_size, steps)

    # The longest suffix that the candidate was seen after.
    used = tl.max(tl.where(found >= 0, length[:, None], 0), axis=0)
    best = tl.max(tl.where(length[:, None] == used[None, :], found, -1), axis=0)
    if IS_BACKOFF:
        best = tl.where((used == 0) & (wanted >= 0) & (wanted < vocab_size), wanted, best)
        gap = 0
        for back in tl.static_range(1, LONGEST + 1):
            gap = tl.where(tl.load(context_ptr + (LONGEST - back)) < 0, 1, gap)
            present += 1 - gap
    code = tl.load(codes_ptr + tl.maximum(best, 0), mask=inside & (best >= 0), other=NONE).to(tl.int32)
    log_prob = code.to(tl.float32) * -scale + (present - used).to(tl.float32) * backoff
    log_prob = tl.where((best < 0) | (code == NONE), floor, log_prob)
    out = row * num_candidates + column
    tl.store(log_probs_ptr + out, log_prob, mask=inside)
    if HAS_MATCHED:
        tl.store(matched_ptr + out, used.to(tl.int8), mask=inside)


def look_up_level(
    store: NgramStore,
    contexts: torch.Tensor,
    candidates: torch.Tensor,
    log_probs: torch.Tensor,
    *,
    matched: torch.Tensor | None = None,
    backoff: float | None = None,
    floor: float = FLOOR,
) -> None:
    """ln p of every candidate after every beam of every request, in one launch without a host wait.

    Args:
        store: placed where the device reads it.
        contexts: int [R, B, K], contiguous: the tokens before, the latest last; negative: no token. The last
            ``store.order - 1`` count, and K is no less.
        candidates: int [R, B, C], any strides: candidates shared by all beams come as an expanded [R, 1, C].
        log_probs: float32 [R, B, C], contiguous, written.
        matched: int8 [R, B, C], contiguous, written: tokens of context that the answer is given by, 0 for none.
        backoff: None for the longest match, or the factor of stupid backoff.
        floor: ln p of what was not seen.
    """
    check_backoff(backoff)
    num_requests, num_beams, num_candidates = candidates.shape
    longest, header = store.order - 1, store.header
    assert contexts.is_contiguous() and log_probs.is_contiguous() and contexts.shape[2] >= longest
    rows, block = num_requests * num_beams, min(64, next_power_of_2(max(1, num_candidates)))
    if not rows or not num_candidates:
        return
    last = contexts.view(rows, -1)[:, contexts.shape[2] - longest :]
    asked = (last, last.stride(0), candidates, *candidates.stride())
    of_store = (store.offsets, store.tokens, store.codes)
    out = (log_probs, matched if matched is not None else log_probs)
    steps = max(header.max_children[:longest]).bit_length()
    sizes = (num_beams, num_candidates, header.vocab_size, header.num_inner, header.total, steps)
    values = (header.scale, floor, math.log(backoff) if backoff is not None else 0.0)
    constants = {"LONGEST": longest, "LENGTHS": next_power_of_2(longest), "NONE": header.none_code, "BLOCK": block}
    kinds = {"IS_BACKOFF": backoff is not None, "HAS_MATCHED": matched is not None}
    _look_up_kernel[(rows, -(-num_candidates // block))](
        *asked, *of_store, *out, *sizes, *values, **constants, **kinds, num_warps=1
    )
