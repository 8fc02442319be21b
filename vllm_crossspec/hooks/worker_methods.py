"""Methods that every engine's workers offer to vLLM's ``collective_rpc`` beyond their own."""

from collections.abc import Callable
from typing import Any

from vllm_crossspec.load import round_shares
from vllm_crossspec.load.costs import as_json


def _problem_of(prepare: Callable[..., None], *arguments: str) -> str | None:
    try:
        prepare(*arguments)
    except (ValueError, OSError) as problem:
        return str(problem)
    return None


class WorkerMethods:
    """The methods that ``hooks`` adds to vLLM's ``WorkerBase``, under the same names."""

    model_runner: Any

    def crossspec_stats(self) -> dict[str, Any] | None:
        """Acceptance by drafter so far (see ``metrics.counters``); None if our proposers do not run."""
        stats = getattr(getattr(self.model_runner, "speculator", None), "acceptance_stats", None)
        return None if stats is None else stats()

    def crossspec_routing(self, feature: str = "routing") -> dict[str, Any] | None:
        """A feature's counts (see ``metrics.routing``); None if the engine has no such feature."""
        stats = getattr(getattr(self.model_runner, "speculator", None), "feature_stats", None)
        return None if stats is None else stats(feature)

    def crossspec_adaptive(self) -> dict[str, Any] | None:
        """Trees and levels by bin (see ``metrics.adaptive``); None if trees have one size."""
        return WorkerMethods.crossspec_routing(self, "adaptive")

    def crossspec_take_records(self) -> list[tuple[list[str], bytes]]:
        """All drafts since the last call (``speculator.recording``); policy "record" only."""
        return self.model_runner.speculator.take_records()

    def crossspec_take_rounds(self) -> list[tuple[list[str], bytes]]:
        """The outcome of every tree since the last call; adaptive type "record" only."""
        return self.model_runner.features["rounds"].take()

    def crossspec_measure(self) -> None:
        """Run the features' measurements that were not done during graph capture."""
        for feature in self.model_runner.features.values():
            feature.measure()

    def crossspec_round_costs(self) -> dict[str, Any] | None:
        """The router's cost table (see ``load.costs``); None if nothing was timed."""
        speculator = self.model_runner.speculator
        costs = speculator.router.costs
        return None if costs is None else as_json(costs, speculator.order)

    def crossspec_step_costs(self) -> Any:
        """Step costs by draft tokens and running requests (see ``load.measure``)."""
        return self.model_runner.measured_step_costs()

    def crossspec_begin_shares(self) -> None:
        """Time the stages of every round from here on (see ``load.round_shares``)."""
        round_shares.begin(self.model_runner)

    def crossspec_end_shares(self) -> dict[str, Any] | None:
        """Shares of target, draft and the rest in these rounds; None if there were none."""
        return round_shares.end(self.model_runner)

    def crossspec_prepare_swap(self, drafter: str, folder: str) -> str | None:
        """Load other weights beside those in use (see ``speculator.swap``); return the problem, if any."""
        return _problem_of(self.model_runner.speculator.swaps.prepare, drafter, folder)

    def crossspec_begin_receiving(self) -> None:
        """Prepare for drafter weights from vLLM's own weight update."""
        self.model_runner.speculator.swaps.begin_receiving()

    def crossspec_prepare_received(self) -> str | None:
        """As ``crossspec_prepare_swap``, with the received weights; does nothing if they were not the drafters'."""
        return _problem_of(self.model_runner.speculator.swaps.prepare_received)

    def crossspec_commit_swap(self) -> list[str]:
        """Draft with the prepared weights; return the names of the changed drafters."""
        return self.model_runner.speculator.commit_swap()

    def crossspec_abandon_swap(self) -> None:
        """Discard the prepared weights."""
        self.model_runner.speculator.swaps.abandon()
