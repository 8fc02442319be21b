"""Decisions of routers and their cost, counted on the host, which knows the routes anyway."""

from typing import Any

import numpy as np

from vllm_crossspec.arrays import Array

BACKLOG_EDGES = (0, 1, 4, 16, 64, 128, 256, 512, 1024)
"""Upper edges of the histogram of missed tokens; one more bucket holds the rest."""

COUNTS = ("decisions", "switches", "missed_tokens", "caught_up_tokens", "catch_ups")


class RoutingCounters:
    """Decisions, switches and catch-ups of drafters ``names``, in routing order, over S request slots."""

    def __init__(self, names: tuple[str, ...], num_slots: int):
        self.names = names
        self.previous = np.full(num_slots, -1, dtype=np.int64)
        self.reset()

    def reset(self) -> None:
        """Forget all counts, but keep each request's last drafter."""
        self.rounds = 0
        self._counts = np.zeros((len(COUNTS), len(self.names)), dtype=np.int64)
        self.decisions, self.switches, self.missed, self.caught_up, self.catch_ups = self._counts
        self.backlogs = np.zeros((len(self.names), len(BACKLOG_EDGES) + 1), dtype=np.int64)

    def forget(self, slots: list[int]) -> None:
        """Other requests take these slots."""
        self.previous[slots] = -1

    def count_decisions(self, slots: Array, routes: Array) -> None:
        """Count a round's routes; int64 [R] each, negative where no drafter drafts."""
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
        """Count tokens (int64 [k]) that a drafter had missed of requests for which another one drafted before."""
        switched = np.maximum(missed, 0)[(self.previous[slots] >= 0) & (self.previous[slots] != drafter)]
        self.missed[drafter] += switched.sum()
        np.add.at(self.backlogs[drafter], np.searchsorted(BACKLOG_EDGES, switched), 1)

    def count_caught_up(self, drafter: int, num_tokens: int) -> None:
        """Count a pass of ``num_tokens`` tokens that computed keys and values alone."""
        self.caught_up[drafter] += num_tokens
        self.catch_ups[drafter] += 1

    def snapshot(self) -> dict[str, Any]:
        """``rounds``, and for each of ``drafters``: :data:`COUNTS`, and ``backlog_histogram``, which is not cumulative.

        Switches and missed tokens count for the drafter switched to.
        """
        drafters = {
            name: {**dict(zip(COUNTS, counts, strict=True)), "backlog_histogram": backlogs}
            for name, counts, backlogs in zip(self.names, self._counts.T.tolist(), self.backlogs.tolist(), strict=True)
        }
        return {"rounds": self.rounds, "drafters": drafters}
