"""Lookups on a CPU, one after the other in machine code: Numba, which comes with vLLM, compiles them.

A level of one request (20 beams of 25 candidates) is too small a batch for PyTorch operations, each of which costs
microseconds to call. Importing this file raises ImportError where Numba is missing; ``lookup.py`` then does without.
"""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import TYPE_CHECKING

import numba
import numpy as np
import torch

if TYPE_CHECKING:
    from vllm_crossspec.ngram.store import NgramStore


@numba.njit(cache=True, nogil=True)
def _child(offsets, tokens, node, wanted, vocab_size, num_inner, total):
    """The child of a node with a token, or -1."""
    # A damaged file must not lead out of the arrays.
    if node < 0 or node >= num_inner:
        return -1
    low = min(max(numba.int64(offsets[node]), vocab_size), total) - vocab_size
    high = min(max(numba.int64(offsets[node + 1]), vocab_size), total) - vocab_size
    while low < high:
        middle = (low + high) >> 1
        value = numba.int64(tokens[middle])
        if value == wanted:
            return middle + vocab_size
        if value < wanted:
            low = middle + 1
        else:
            high = middle
    return -1


@numba.njit(cache=True, nogil=True)
def _look_up(arrays, sizes, contexts, candidates, weights, log_probs, matched):
    """All candidates [M, C] after their contexts [M, K], K below the order; ``weights``: scale, floor, ln factor."""
    offsets, tokens, codes = arrays
    vocab_size, num_inner, total, none, is_backoff = sizes
    scale, floor, factor = weights
    longest = contexts.shape[1]
    for row in range(contexts.shape[0]):
        nodes = np.full(longest + 1, -1, np.int64)
        present = 0
        while present < longest and contexts[row, longest - 1 - present] >= 0:
            present += 1
        for length in range(1, present + 1):
            node = contexts[row, longest - length]
            if node >= vocab_size:
                node = -1
            for place in range(longest - length + 1, longest):
                node = _child(offsets, tokens, node, contexts[row, place], vocab_size, num_inner, total)
            nodes[length] = node
        for column in range(candidates.shape[1]):
            wanted = candidates[row, column]
            used = present
            found = numba.int64(-1)
            while used > 0:
                found = _child(offsets, tokens, nodes[used], wanted, vocab_size, num_inner, total)
                if found >= 0:
                    break
                used -= 1
            if found < 0 and is_backoff and 0 <= wanted < vocab_size:
                found = wanted
            matched[row, column] = used
            log_prob = floor
            if found >= 0:
                code = numba.int64(codes[found])
                if code != none:
                    log_prob = -scale * code + (present - used) * factor
            log_probs[row, column] = log_prob


def look_up_compiled(
    store: "NgramStore", contexts: torch.Tensor, candidates: torch.Tensor, backoff: float | None, floor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``lookup.look_up`` on CPU tensors, int64 [M, K] and [M, C]; K is below the store's order."""
    header = store.header
    log_probs = torch.empty(candidates.shape, dtype=torch.float32)
    matched = torch.empty(candidates.shape, dtype=torch.int8)
    _look_up(
        (store.offsets.numpy(), store.tokens.numpy(), store.codes.numpy()),
        (header.vocab_size, header.num_inner, header.total, header.none_code, backoff is not None),
        contexts.contiguous().numpy(),
        candidates.contiguous().numpy(),
        (header.scale, floor, math.log(backoff) if backoff is not None else 0.0),
        log_probs.numpy(),
        matched.numpy(),
    )
    return log_probs, matched
