"""Finds earlier occurrences of every request's last tokens: in its own text, and in outputs of earlier requests.

A *match* is a place whose preceding tokens equal the request's last ones; its *length* is the number of equal tokens.
The tokens after it are its *continuation*. In a request's own text, which grows in every round, all places are
compared. A corpus of earlier outputs has its places ordered by the tokens before them, read backwards, and is searched
by bisection. All places of one context are then adjacent, as below a node of a suffix tree (SuffixDecoding, Oliaro et
al. 2024, section 3). Their number is its frequency.

Shape legend: R requests, S slots, L longest text, M matches of a request, D tokens of a continuation, C corpus tokens.
"""

# mypy: disable-error-code="no-untyped-def"
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_crossspec.ngram_store.contexts import Texts, text_of

NO_TOKEN = -1
"""The token after a continuation's end, and between the outputs of a corpus."""

_NO_TOKEN = tl.constexpr(NO_TOKEN)
_END_BITS = tl.constexpr(32)
_BEFORE_TEXT = tl.constexpr(-2)


class Matches(NamedTuple):
    """The matches of a batch.

    Attributes:
        continuations: int32 [R, M, D]; :data:`NO_TOKEN` past their ends, and everywhere without a match.
        lengths: int32 [R, M] equal tokens; 0 without a match. Of equally long own matches the latest comes first.
        counts: float32 [R, M] number of places that the match represents.
    """

    continuations: torch.Tensor
    lengths: torch.Tensor
    counts: torch.Tensor


@triton.jit
def _own_matches_kernel(
    idx_mapping_ptr,
    num_computed_ptr,
    all_token_ids_ptr,
    all_token_ids_stride,
    last_position,
    continuations_ptr,  # int32 [R, M, D] out
    lengths_ptr,  # int32 [R, M] out
    counts_ptr,  # float32 [R, M] out
    row_matches,  # M
    num_matches,
    depth,  # D
    min_match,
    MAX_MATCH: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    text, newest = text_of(idx_mapping_ptr, num_computed_ptr, all_token_ids_ptr, all_token_ids_stride, last_position)
    lane = tl.arange(0, BLOCK)
    # The best place of every lane: length in the high bits, position in the low ones. A lane has one of BLOCK places.
    best = tl.full([BLOCK], -1, tl.int64)
    for start in range(0, newest, BLOCK):
        end = start + lane
        agrees = end < newest
        length = tl.zeros([BLOCK], tl.int32)
        for back in tl.static_range(MAX_MATCH):
            own = tl.load(text + newest - back, mask=newest >= back, other=_BEFORE_TEXT)
            token = tl.load(text + end - back, mask=agrees & (end >= back), other=_NO_TOKEN)
            agrees = agrees & (token == own)
            length += agrees.to(tl.int32)
        found = (length.to(tl.int64) << _END_BITS) + end
        best = tl.maximum(best, tl.where(length >= min_match, found, -1))

    step = tl.arange(0, DEPTH)
    first = tl.program_id(0).to(tl.int64) * row_matches
    for match in range(num_matches):
        top, at = tl.max(best, axis=0, return_indices=True)
        best = tl.where(lane == at, -1, best)
        length = tl.maximum(top >> _END_BITS, 0).to(tl.int32)
        end = tl.maximum(top, 0) - (length.to(tl.int64) << _END_BITS)
        # A continuation that reaches the text's end repeats itself with this period.
        period = tl.maximum(newest - end, 1)
        token = tl.load(text + end + 1 + step % period, mask=(length > 0) & (step < depth), other=_NO_TOKEN)
        tl.store(continuations_ptr + (first + match) * depth + step, token, mask=step < depth)
        tl.store(lengths_ptr + first + match, length)
        tl.store(counts_ptr + first + match, 1.0)


@triton.jit
def _corpus_context(tokens_ptr, order_ptr, index, num_places, lane):
    """The place at ``index`` of the order, and the tokens up to it, the last one first."""
    inside = (index >= 0) & (index < num_places)
    place = tl.load(order_ptr + index, mask=inside, other=-1)
    context = tl.load(tokens_ptr + place - lane, mask=place >= lane, other=_NO_TOKEN)
    return place, context


@triton.jit
def _common(context, query, lane, CONTEXT: tl.constexpr):
    """How many of the last tokens are equal."""
    return tl.min(tl.where(context == query, CONTEXT, lane), axis=0)


@triton.jit
def _first_place(
    tokens_ptr, order_ptr, num_places, query, length, lane, PAST_EQUAL: tl.constexpr, NUM_STEPS: tl.constexpr
):
    """The first place whose last ``length`` tokens are not below the query's (``PAST_EQUAL``: are above it)."""
    low = 0
    high = num_places
    for _ in range(NUM_STEPS):
        middle = (low + high) // 2
        _, context = _corpus_context(tokens_ptr, order_ptr, middle, num_places, lane)
        differs = (context != query) & (lane < length)
        at = tl.min(tl.where(differs, lane, length), axis=0)
        own = tl.sum(tl.where(lane == at, query, 0), axis=0)
        found = tl.sum(tl.where(lane == at, context, 0), axis=0)
        is_before = ((at < length) & (found < own)) | ((at >= length) & PAST_EQUAL)
        is_open = low < high
        low = tl.where(is_open & is_before, middle + 1, low)
        high = tl.where(is_open & ~is_before, middle, high)
    return low


@triton.jit
def _corpus_matches_kernel(
    idx_mapping_ptr,
    num_computed_ptr,
    all_token_ids_ptr,
    all_token_ids_stride,
    last_position,
    tokens_ptr,  # int32 [C]
    order_ptr,  # int32 [places]
    num_places,
    continuations_ptr,  # int32 [R, M, D] out, from match `first_match` on
    lengths_ptr,  # int32 [R, M] out
    counts_ptr,  # float32 [R, M] out
    row_matches,  # M
    first_match,
    num_matches,
    depth,  # D
    min_match,
    CONTEXT: tl.constexpr,
    DEPTH: tl.constexpr,
    NUM_STEPS: tl.constexpr,
):
    text, newest = text_of(idx_mapping_ptr, num_computed_ptr, all_token_ids_ptr, all_token_ids_stride, last_position)
    lane = tl.arange(0, CONTEXT)
    query = tl.load(text + newest - lane, mask=newest >= lane, other=_BEFORE_TEXT)
    # The longest match is next to the place where the query itself would be.
    here = _first_place(tokens_ptr, order_ptr, num_places, query, CONTEXT, lane, False, NUM_STEPS)
    _, above = _corpus_context(tokens_ptr, order_ptr, here, num_places, lane)
    _, below = _corpus_context(tokens_ptr, order_ptr, here - 1, num_places, lane)
    length = tl.maximum(_common(above, query, lane, CONTEXT), _common(below, query, lane, CONTEXT))
    length = tl.where(length >= min_match, length, 0)
    start = _first_place(tokens_ptr, order_ptr, num_places, query, length, lane, False, NUM_STEPS)
    end = _first_place(tokens_ptr, order_ptr, num_places, query, length, lane, True, NUM_STEPS)
    num_found = tl.where(length > 0, end - start, 0)

    step = tl.arange(0, DEPTH)
    first = tl.program_id(0).to(tl.int64) * row_matches + first_match
    num_taken = tl.minimum(num_found, num_matches)
    for match in range(num_matches):
        is_taken = match < num_taken
        # Take places at even distances: all places of a context are equally good.
        index = start + (match * num_found) // tl.maximum(num_taken, 1)
        place = tl.load(order_ptr + index, mask=is_taken, other=0)
        token = tl.load(tokens_ptr + place + 1 + step, mask=is_taken & (step < depth), other=_NO_TOKEN)
        ended = tl.min(tl.where(token == _NO_TOKEN, step, DEPTH), axis=0)
        token = tl.where(step < ended, token, _NO_TOKEN)
        tl.store(continuations_ptr + (first + match) * depth + step, token, mask=step < depth)
        tl.store(lengths_ptr + first + match, tl.where(is_taken, length, 0))
        tl.store(counts_ptr + first + match, num_found.to(tl.float32) / tl.maximum(num_taken, 1).to(tl.float32))


def own_matches(texts: Texts, *, max_match: int, min_match: int, num_matches: int, out: Matches) -> None:
    """Find the longest matches of every request in its own text, the latest of equal ones; one launch, no wait.

    Of places that are a multiple of the block's length (1024 tokens) apart, only the best is found.

    Args:
        texts: of the batch.
        max_match, min_match: most tokens to compare, and fewest of a match.
        num_matches: number of matches to find; they are written first in ``out``.
        out: written.
    """
    num_reqs, row_matches, depth = out.continuations.shape
    block = min(1024, triton.next_power_of_2(texts.all_token_ids.shape[1]))
    constants = {"MAX_MATCH": max_match, "DEPTH": triton.next_power_of_2(depth), "BLOCK": block}
    sizes = (row_matches, num_matches, depth, min_match)
    _own_matches_kernel[(num_reqs,)](*texts.arguments, *out, *sizes, **constants)


def corpus_matches(
    texts: Texts,
    corpus: tuple[torch.Tensor, torch.Tensor],
    *,
    max_match: int,
    min_match: int,
    first_match: int,
    num_matches: int,
    out: Matches,
) -> None:
    """Find the longest matches of every request in earlier outputs, all of one length; one launch, no wait.

    Args:
        texts: of the batch.
        corpus: int32 [C] tokens with :data:`NO_TOKEN` between outputs and at the end, and int32 [places] of
            :func:`places_in_order`.
        max_match: most tokens to compare, a power of 2.
        min_match: fewest tokens of a match.
        first_match, num_matches: where the matches are written, and how many.
        out: written.
    """
    num_reqs, row_matches, depth = out.continuations.shape
    constants = {"CONTEXT": max_match, "DEPTH": triton.next_power_of_2(depth), "NUM_STEPS": 31}
    sizes = (row_matches, first_match, num_matches, depth, min_match)
    _corpus_matches_kernel[(num_reqs,)](
        *texts.arguments, *corpus, len(corpus[1]), *out, *sizes, **constants, num_warps=1
    )
