"""What routers decided and what it cost, counted on the host, which knows the routes anyway."""

from typing import Any

import numpy as np

from vllm_crossspec.arrays import Array

BACKLOG_EDGES = (0, 1, 4, 16, 64, 128, 256, 512, 1024)
"""Upper edges of the histogram of missed tokens; one more bucket holds the rest."""

COUNTS = ("decisions", "switches", "missed_tokens", "caught_up_tokens", "catch_ups")


class RoutingCounters:
    """Decisions, switches and catch-ups of a drafter each.

    Args:
        names: of the drafters, in routing order.
        num_slots: S, request slots of the engine.
    """

    def __init__(self, names: tuple[str, ...], num_slots: int):
        self.names = names
        self.previous = np.full(num_slots, -1, dtype=np.int64)
        self.reset()

    def reset(self) -> None:
        """Forget all counts, not who drafted last."""
        size = len(self.names)
        self.rounds = 0
        by_drafter = np.zeros((5, size), dtype=np.int64)
        self.decisions, self.switches, self.missed, self.caught_up, self.catch_ups = by_drafter
        self.backlogs = np.zeros((size, len(BACKLOG_EDGES) + 1), dtype=np.int64)

    def forget(self, slots: list[int]) -> None:
        """Other requests take these slots."""
        self.previous[slots] = -1

    def count_decisions(self, slots: Array, routes: Array) -> None:
        """A round's routes; int64 [R] each, negative where no drafter drafts."""
        routed = routes >= 0
        if not routed.any():
            return
        self.rounds += 1
        slots, routes = slots[routed], routes[routed]
        before = self.previous[slots]
        np.add.at(self.decisions, routes, 1)
        np.add.at(self.switches, routes[(before >= 0) & (before != routes)], 1)
        self.previous[slots] = routes

    def count_missed(self, drafter: int, slots: Array, missed: Array) -> None:
        """Tokens (int64 [k]) that a chosen drafter had missed of each request, where another drafted before."""
        switched = np.maximum(missed, 0)[(self.previous[slots] >= 0) & (self.previous[slots] != drafter)]
        self.missed[drafter] += switched.sum()
        np.add.at(self.backlogs[drafter], np.searchsorted(BACKLOG_EDGES, switched), 1)

    def count_caught_up(self, drafter: int, num_tokens: int) -> None:
        """One pass of keys and values alone, of so many tokens."""
        self.caught_up[drafter] += num_tokens
        self.catch_ups[drafter] += 1

    def snapshot(self) -> dict[str, Any]:
        """All counts as numbers: rounds, and by drafter.

        Returns:
            {"rounds": n, "drafters": {name: {decisions, switches, missed_tokens, backlog_histogram,
            caught_up_tokens, catch_ups}}}; switches and missed tokens count for the drafter switched to. The histogram
            has the switches of each bucket alone, not of those below it, too.
        """
        return {
            "rounds": self.rounds,
            "drafters": {
                name: {
                    "decisions": int(self.decisions[i]),
                    "switches": int(self.switches[i]),
                    "missed_tokens": int(self.missed[i]),
                    "backlog_histogram": self.backlogs[i].tolist(),
                    "caught_up_tokens": int(self.caught_up[i]),
                    "catch_ups": int(self.catch_ups[i]),
                }
                for i, name in enumerate(self.names)
            },
        }
