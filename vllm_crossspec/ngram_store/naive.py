"""The plain twin of the kernel: one candidate after the other, by what the store's arrays mean."""

import math

import torch

from vllm_crossspec.ngram_store.contexts import Texts
from vllm_crossspec.ngram_store.store import FLOOR, NgramStore


def look_up_level_naive(
    store: NgramStore,
    contexts: torch.Tensor,
    candidates: torch.Tensor,
    *,
    backoff: float | None = None,
    floor: float = FLOOR,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``look_up_level``: ln p float32 [R, B, C], and the tokens of context used, int8 [R, B, C]."""
    log_probs = torch.full(candidates.shape, floor)
    matched = torch.zeros(candidates.shape, dtype=torch.int8)
    for place in torch.cartesian_prod(*map(torch.arange, candidates.shape)).tolist():
        request, beam, candidate = place
        context = contexts[request, beam].tolist()[-(store.order - 1) :]
        while context and min(context) < 0:  # what comes before a missing token is no context
            context = context[1:]
        log_prob, length = _one(store, context, int(candidates[request, beam, candidate]), backoff, floor)
        log_probs[request, beam, candidate], matched[request, beam, candidate] = log_prob, length
    return log_probs, matched


def _one(
    store: NgramStore, context: list[int], candidate: int, backoff: float | None, floor: float
) -> tuple[float, int]:
    for length in range(len(context), -1 if backoff is not None else 0, -1):
        node = _node(store, [*context[len(context) - length :], candidate])
        if node is None:
            continue
        code = int(store.codes[node])
        if code == store.header.none_code:
            return floor, length
        penalty = (len(context) - length) * math.log(backoff) if backoff is not None else 0.0
        return penalty - code * store.header.scale, length
    return floor, 0


def _node(store: NgramStore, ngram: list[int]) -> int | None:
    vocab_size = store.header.vocab_size
    if not all(0 <= token < vocab_size for token in ngram):
        return None
    node = ngram[0]
    for token in ngram[1:]:
        begin, end = int(store.offsets[node]), int(store.offsets[node + 1])
        children = store.tokens[begin - vocab_size : end - vocab_size].tolist()
        if token not in children:
            return None
        node = begin + children.index(token)
    return node


def last_tokens_naive(texts: Texts, width: int) -> torch.Tensor:
    """As ``last_tokens``: int64 [R, W]."""
    idx_mapping, num_computed, all_token_ids = texts
    contexts = torch.full((len(idx_mapping), width), -1, device=all_token_ids.device)
    for request, slot in enumerate(idx_mapping.tolist()):
        if slot >= 0:
            newest = min(int(num_computed[slot]), all_token_ids.shape[1] - 1)
            known = all_token_ids[slot, max(0, newest - width + 1) : newest + 1]
            contexts[request, width - len(known) :] = known
    return contexts
