"""Batched lookups in a store by PyTorch operations, on any device. Drafts take ``ngram_store.kernels``."""

import math
from typing import NamedTuple

import torch

from vllm_crossspec.ngram_store.store import FLOOR, NgramStore, check_backoff

LOOKUPS_AT_ONCE = 1 << 15
"""Lookups whose working arrays fit a core's cache."""


class Answers(NamedTuple):
    """Of lookups: ln p float32, and the tokens of context that it is given by, int8 (0: none)."""

    log_probs: torch.Tensor
    matched: torch.Tensor


def look_up(
    store: NgramStore,
    contexts: torch.Tensor,
    candidates: torch.Tensor,
    *,
    backoff: float | None = None,
    floor: float = FLOOR,
) -> Answers:
    """[M, C] log-probabilities of candidates after contexts, off by ``store.header.max_error`` nats at most.

    Args:
        store: on any device, with the other two there as well.
        contexts: int [M, K] the tokens before, the latest last; negative: there is none. Only the last ``order - 1``
            count, and one that is no token of the vocabulary matches nothing.
        candidates: int [M, C].
        backoff: None for the longest match; a factor in (0, 1] for stupid backoff.
        floor: ln p of what was not seen.
    """
    check_backoff(backoff)
    longest = min(store.order - 1, contexts.shape[1])
    contexts, candidates = contexts[:, contexts.shape[1] - longest :].long(), candidates.long()
    if candidates.device.type != "cpu":
        return _look_up(store, contexts, candidates, backoff, floor)
    rows = max(1, LOOKUPS_AT_ONCE // max(1, candidates.shape[1]))
    parts = zip(contexts.split(rows), candidates.split(rows), strict=True)
    found = [_look_up(store, *part, backoff, floor) for part in parts]
    return Answers(*map(torch.cat, zip(*found, strict=True)))


def _look_up(
    store: NgramStore, contexts: torch.Tensor, candidates: torch.Tensor, backoff: float | None, floor: float
) -> Answers:
    longest = contexts.shape[1]
    known = (candidates >= 0) & (candidates < store.header.vocab_size)
    matched = torch.zeros(candidates.shape, dtype=torch.int8, device=candidates.device)
    nodes = torch.where(known, candidates, -1) if backoff is not None else torch.full_like(candidates, -1)
    for length in range(1, longest + 1):
        context = _walk(store, contexts[:, longest - length :])
        found = _children(store, context[:, None], candidates, length)
        nodes = torch.where(found >= 0, found, nodes)
        matched = torch.where(found >= 0, length, matched)
    codes = store.codes[nodes.clamp(min=0)]
    log_probs = codes.float() * -store.header.scale
    if backoff is not None:
        # A context at the beginning of a text is shorter, and nothing was dropped for that.
        present = (contexts >= 0).flip(1).long().cumprod(1).sum(1, keepdim=True)
        log_probs += (present - matched) * math.log(backoff)
    unseen = (nodes < 0) | (codes == store.header.none_code)
    return Answers(log_probs.masked_fill_(unseen, floor), matched.to(torch.int8))


def _walk(store: NgramStore, path: torch.Tensor) -> torch.Tensor:
    """Nodes of n-grams, int64 [M] of int64 [M, length]; -1 where one was not seen."""
    first = path[:, 0]
    nodes = torch.where((first >= 0) & (first < store.header.vocab_size), first, -1)
    for level in range(1, path.shape[1]):
        nodes = _children(store, nodes, path[:, level], level)
    return nodes


def _children(store: NgramStore, nodes: torch.Tensor, tokens: torch.Tensor, level: int) -> torch.Tensor:
    """Which child of a node has a token, by binary search: int64 like ``tokens``, -1 without such a child.

    ``nodes``: int64 of ``level`` (1: single tokens), -1 for none. ``tokens``: int64, of a shape that they extend to.
    """
    header = store.header
    parents = nodes.clamp(0, header.num_inner - 1)  # a damaged file must not lead out of the arrays
    low = store.offsets[parents].long().clamp(header.vocab_size, header.total) - header.vocab_size
    high = store.offsets[parents + 1].long().clamp(header.vocab_size, header.total) - header.vocab_size
    high = torch.where(nodes >= 0, high, low)
    if not len(store.tokens):
        return torch.full_like(tokens, -1)
    most = header.max_children[level - 1]
    if nodes.device.type == "cpu" and nodes.numel():  # on a GPU this would make the host wait
        most = min(most, int((high - low).max()))
    low, high = low.expand(tokens.shape), high.expand(tokens.shape)
    end, last = high, len(store.tokens) - 1
    wanted = tokens.to(store.tokens.dtype)
    for _ in range(most.bit_length()):
        middle = (low + high) >> 1
        is_less = (store.tokens[middle.clamp(max=last)] < wanted) & (middle < high)
        low, high = torch.where(is_less, middle + 1, low), torch.where(is_less, high, middle)
    # An id that the stored type cannot hold would have wrapped round.
    is_token = (tokens >= 0) & (tokens < header.vocab_size)
    is_there = (low < end) & (store.tokens[low.clamp(max=last)] == wanted) & is_token
    return torch.where(is_there, low + header.vocab_size, -1)
