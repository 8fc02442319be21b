"""Whose a round is: the target's pass, the drafting, and the rest, of any model runner, with our proposers or without.

While it is measured, the runner's ``execute_model`` and the speculator's ``propose`` are stood in for on the instances,
and a clock of ours in the place of ``step_timing``, of which a step calls ``forward_start``. On a GPU a mark is an
event on the stream that the step runs on, so nothing waits; all are read at the end.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from vllm_crossspec.engine.startup.clock import StepClock
from vllm_crossspec.metrics.stages import Marks

WARM_UP_ROUNDS = 2


class RoundShares:
    """Marks of one runner's rounds, from its making to :meth:`end`.

    Args:
        runner: vLLM's model runner, or ours.
    """

    def __init__(self, runner: Any):
        self._runner, self._marks = runner, Marks(runner.device)
        self._clock, self._kept = StepClock(runner.device), runner.step_timing
        self._rounds: list[tuple[bool, Any, list[Any]]] = []  # decodes only; where it begins; the clock's marks
        execute = runner.execute_model

        def execute_model(scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
            self._clock.marks = []
            self._rounds.append((not scheduler_output.scheduled_new_reqs, self._marks.now(), self._clock.marks))
            result = execute(scheduler_output, *arguments, **options)
            self._clock.mark()
            return result

        runner.execute_model, runner.step_timing = execute_model, self._clock
        if runner.speculator is not None:
            runner.speculator.propose = self._around(runner.speculator.propose)

    def _around(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self._clock.mark()
            result = inner(*arguments, **options)
            self._clock.mark()
            return result

        return call

    def end(self) -> dict[str, Any] | None:
        """Give the runner its own back; waits for the device.

        Returns:
            Means over rounds without a new prompt that another round follows: their number ``rounds``, ``seconds`` of
            one from its beginning to the next one's, and of these the shares ``target``, ``draft`` and ``rest``
            (scheduling, inputs, sampling, outputs). None where there is no such round.
        """
        runner = self._runner
        del runner.execute_model
        runner.step_timing = self._kept
        if runner.speculator is not None:
            del runner.speculator.propose
        if self._rounds:
            self._marks.wait(self._rounds[-1][1])
        between, total, count = self._marks.seconds, {"target": 0.0, "draft": 0.0, "round": 0.0}, 0
        for (decodes, start, marks), (_, following, _) in pairwise(self._rounds[WARM_UP_ROUNDS:]):
            if decodes and len(marks) >= 2:  # a step without tokens runs no model
                total["round"] += between(start, following)
                total["target"] += between(*marks[:2])
                total["draft"] += between(*marks[2:4]) if len(marks) == 4 else 0.0
                count += 1
        if not count:
            return None
        target, draft = total["target"] / total["round"], total["draft"] / total["round"]
        return {
            "rounds": count,
            "seconds": total["round"] / count,
            "target": target,
            "draft": draft,
            "rest": 1.0 - target - draft,
        }


_running: dict[int, RoundShares] = {}


def begin(runner: Any) -> None:
    """Mark this runner's rounds; does nothing for vLLM's V1 runner, whose steps have other parts."""
    if hasattr(runner, "step_timing"):
        _running[id(runner)] = RoundShares(runner)


def end(runner: Any) -> dict[str, Any] | None:
    """See :meth:`RoundShares.end`."""
    shares = _running.pop(id(runner), None)
    return None if shares is None else shares.end()
