"""Matches and their trees by simple loops, for tests."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from vllm_crossspec.drafters.lookup.kernels import NO_TOKEN
from vllm_crossspec.drafters.lookup.trees import BEYOND


class Match(NamedTuple):
    """One match: equal tokens, continuation, and the number of places that it represents."""

    length: int
    continuation: tuple[int, ...]
    places: float = 1.0


def agreeing(text: Sequence[int], end: int, query: Sequence[int], max_match: int) -> int:
    """How many last tokens of ``query`` equal those of ``text`` up to position ``end``."""
    length = 0
    while length < min(max_match, end + 1, len(query)) and text[end - length] == query[-1 - length]:
        length += 1
    return length


def own_matches_naive(
    text: Sequence[int], *, max_match: int, min_match: int, num_matches: int, depth: int
) -> list[Match]:
    """As ``own_matches``."""
    found = []
    for end in range(len(text) - 1):
        length = agreeing(text, end, text, max_match)
        if length >= min_match:
            period = len(text) - 1 - end
            found.append((length, end, tuple(text[end + 1 + step % period] for step in range(depth))))
    found.sort(reverse=True)
    return [Match(length, continuation) for length, _, continuation in found[:num_matches]]


def corpus_matches_naive(
    text: Sequence[int], outputs: Sequence[Sequence[int]], *, max_match: int, min_match: int, depth: int
) -> list[Match]:
    """As ``corpus_matches``, but all matches, in no order, each for one place."""
    found = []
    for output in outputs:
        for end in range(len(output) - 1):
            length = agreeing(output, end, text, max_match)
            if length >= min_match:
                found.append(Match(length, tuple(output[end + 1 : end + 1 + depth])))
    longest = max((match.length for match in found), default=0)
    return [match for match in found if match.length == longest]


def match_tree_naive(matches: Sequence[Match], max_match: int, num_nodes: int) -> dict[tuple[int, ...], float]:
    """As ``match_tree``: the best nodes, each as the tokens of its path, with log-probabilities.

    Of equally probable nodes the shallower one comes first, then the one of the earlier match.
    """
    mass: dict[tuple[int, ...], float] = {}
    first: dict[tuple[int, ...], int] = {}
    total = 1.0
    for number, match in enumerate(matches):
        agreed = match.length if match.length < max_match else BEYOND * max_match
        total += agreed * match.places
        for depth in range(1, len(match.continuation) + 1):
            prefix = match.continuation[:depth]
            if NO_TOKEN in prefix:
                break
            mass[prefix] = mass.get(prefix, 0.0) + agreed * match.places * (agreed + 1) / (agreed + depth)
            first.setdefault(prefix, number)
    order = sorted(mass, key=lambda prefix: (-mass[prefix], len(prefix), first[prefix]))
    return {prefix: math.log(mass[prefix] / total) for prefix in order[:num_nodes]}
