"""The truth about matches and the trees of them: loops that are easy to believe, for tests."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from vllm_crossspec.lookup.kernels import NO_TOKEN
from vllm_crossspec.lookup.trees import BEYOND


class Match(NamedTuple):
    """One place.

    Attributes:
        length: tokens that agree.
        continuation: what followed.
        places: places that it stands for.
    """

    length: int
    continuation: tuple[int, ...]
    places: float = 1.0


def agreeing(text: Sequence[int], end: int, query: Sequence[int], max_match: int) -> int:
    """How many of the last tokens of ``query`` are those of ``text`` up to position ``end``."""
    length = 0
    while length < min(max_match, end + 1, len(query)) and text[end - length] == query[-1 - length]:
        length += 1
    return length


def own_matches_naive(
    text: Sequence[int], *, max_match: int, min_match: int, num_matches: int, depth: int
) -> list[Match]:
    """The longest matches in a request's own text, the latest of equal ones."""
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
    """All places of the longest context that some earlier output has; in no order, each for one."""
    found = []
    for output in outputs:
        for end in range(len(output) - 1):
            length = agreeing(output, end, text, max_match)
            if length >= min_match:
                found.append(Match(length, tuple(output[end + 1 : end + 1 + depth])))
    longest = max((match.length for match in found), default=0)
    return [match for match in found if match.length == longest]


def match_tree_naive(matches: Sequence[Match], max_match: int, num_nodes: int) -> dict[tuple[int, ...], float]:
    """The nodes of the tree, each the tokens that lead to it, with their log-probabilities; the best ``num_nodes``.

    Of nodes of equal probability the shallower one comes first, then the one of the earlier match.
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
