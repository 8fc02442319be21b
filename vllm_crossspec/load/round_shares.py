"""How a round's time divides into the target's pass, the drafting and the rest, in any model runner of vLLM's V2.

While it is measured, the runner's ``execute_model`` and ``step_timing`` and the speculator's ``propose`` are replaced
on the instances. On a GPU a mark is an event on the stream of the step, so nothing waits; all are read at the end.
"""

from itertools import pairwise
from typing import Any

from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_crossspec.load.clock import StepClock

WARM_UP_ROUNDS = 2


class RoundShares:
    """Marks of one runner's rounds, from its making to :meth:`end`."""

    def __init__(self, runner: Any):
        self._runner, self._clock, self._kept = runner, StepClock(runner.device), runner.step_timing
        self._rounds: list[tuple[bool, Any, list[Any]]] = []  # decodes only; where it begins; the clock's marks
        clock, execute = self._clock, runner.execute_model

        def execute_model(scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
            clock.marks = []
            self._rounds.append((not scheduler_output.scheduled_new_reqs, clock.now(), clock.marks))
            result = execute(scheduler_output, *arguments, **options)
            clock.mark()
            return result

        runner.execute_model, runner.step_timing = execute_model, clock
        speculator: BaseSpeculator | None = runner.speculator
        if speculator is not None:
            propose = speculator.propose

            def timed_propose(*arguments: Any, **options: Any) -> Any:
                clock.mark()
                result = propose(*arguments, **options)
                clock.mark()
                return result

            speculator.propose = timed_propose

    def end(self) -> dict[str, Any] | None:
        """Undo the replacements; waits for the device. Returns None without a round to measure, or means over rounds.

        They are over rounds without a new prompt that another round follows: how many ``rounds``, ``seconds`` of one up
        to the next, and the shares ``target``, ``draft`` and ``rest`` (scheduling, inputs, sampling, outputs).
        """
        runner, between = self._runner, self._clock.between
        del runner.execute_model
        runner.step_timing = self._kept
        if runner.speculator is not None:
            del runner.speculator.propose
        if self._rounds:
            self._clock.wait(self._rounds[-1][1])
        timed = [
            (between(start, following), between(*marks[:2]), between(*marks[2:4]) if len(marks) == 4 else 0.0)
            for (decodes, start, marks), (_, following, _) in pairwise(self._rounds[WARM_UP_ROUNDS:])
            if decodes and len(marks) >= 2  # a step without tokens runs no model
        ]
        if not timed:
            return None
        seconds, target, draft = (sum(column) for column in zip(*timed, strict=True))
        target, draft = target / seconds, draft / seconds
        shares = {"target": target, "draft": draft, "rest": 1.0 - target - draft}
        return {"rounds": len(timed), "seconds": seconds / len(timed), **shares}


_running: dict[int, RoundShares] = {}


def begin(runner: Any) -> None:
    """Mark this runner's rounds; does nothing for vLLM's V1 runner, whose steps have other parts."""
    if hasattr(runner, "step_timing"):
        _running[id(runner)] = RoundShares(runner)


def end(runner: Any) -> dict[str, Any] | None:
    """See :meth:`RoundShares.end`."""
    shares = _running.pop(id(runner), None)
    return None if shares is None else shares.end()
