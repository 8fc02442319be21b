"""Drafts against drafts: exactly, but for ties that float32 cannot tell apart."""

from itertools import pairwise
from typing import NamedTuple

import torch

TIE = 1e-4
"""Two engines sum in different orders: logits of order 1 come out some 1e-6 apart, so a gap below this is a tie."""


class Draft(NamedTuple):
    """What a reference drafted in one round.

    Attributes:
        tokens: K token ids.
        gaps: K distances between its two largest logits.
    """

    tokens: list[int]
    gaps: list[float]


class Agreement(NamedTuple):
    """Outcome of a comparison, summed over rounds.

    Attributes:
        rounds: that both have.
        tokens: that were compared.
        equal_rounds: whose drafts are equal in every token.
        ties: where the reference itself was undecided; what follows a tie in its round is not compared.
        missing: rounds that only one of them has.
        accepted: draft tokens that the target accepted, and so the next round built on.
        smallest_gap: of all the tokens that were compared.
    """

    rounds: int = 0
    tokens: int = 0
    equal_rounds: int = 0
    ties: tuple[str, ...] = ()
    missing: int = 0
    accepted: int = 0
    smallest_gap: float = float("inf")

    def __add__(self, other: "Agreement") -> "Agreement":  # type: ignore[override]
        sums = [a + b for a, b in zip(self[:-1], other[:-1], strict=True)]
        return Agreement(*sums, min(self.smallest_gap, other.smallest_gap))

    @property
    def is_full(self) -> bool:
        """Whether every round agrees, ties aside."""
        return not self.missing and self.equal_rounds + len(self.ties) == self.rounds


def top_gaps(logits: torch.Tensor) -> list[float]:
    """Distance between the two largest of each row of ``logits`` [..., V]."""
    top = logits.float().topk(2, dim=-1).values.reshape(-1, 2)
    return (top[:, 0] - top[:, 1]).tolist()


def compare(drafts: dict[int, list[int]], reference: dict[int, Draft]) -> Agreement:
    """Compare the drafts of one request, round by round; keys are the numbers of tokens known."""
    missing = len(drafts.keys() ^ reference.keys())
    starts = sorted(drafts.keys() & reference.keys())
    accepted = sum(b - a - 1 for a, b in pairwise(starts))
    total = Agreement(missing=missing, accepted=accepted)
    for start in starts:
        total += _compare_round(start, drafts[start], reference[start])
    return total


def _compare_round(start: int, draft: list[int], reference: Draft) -> Agreement:
    for index, (mine, theirs, gap) in enumerate(zip(draft, reference.tokens, reference.gaps, strict=True)):
        if mine != theirs:
            tie = (f"after {start} tokens, draft token {index}: {mine} for {theirs}, gap {gap:.1e}",)
            smallest = min(reference.gaps[: index + 1])
            return Agreement(1, index + 1, 0, tie if gap < TIE else (), 0, 0, smallest)
    return Agreement(1, len(draft), 1, (), 0, 0, min(reference.gaps))
