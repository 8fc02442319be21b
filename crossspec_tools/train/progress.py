"""What a training shows while it runs: a bar on a terminal, lines elsewhere, and what makes slow steps faster."""

import os
import time
from collections import deque
from collections.abc import Mapping
from datetime import timedelta

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

WINDOW = 50
"""The pace is that of the last so many steps."""
SECONDS_A_LINE = 30.0
"""Seconds between lines where there is no terminal."""
SLOW_STEP = 10.0
"""Seconds of a step on a CPU from which on there is a hint."""


class StepProgress(Progress):
    """The progress of one run of the loop. From its second step on it tells tokens a second and the time left."""

    def __init__(self, title: str, step: int, steps: int):
        self.title, self.steps = title, steps
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=12), MofNCompleteColumn(), TimeElapsedColumn())
        super().__init__(*columns, TextColumn("{task.fields[pace]}"), refresh_per_second=0.5)
        self._task = self.add_task(title, total=steps, completed=step, pace="")
        self._ends: deque[tuple[float, float]] = deque(maxlen=WINDOW + 1)
        self._said = 0.0

    def say(self, sentence: str) -> None:
        """A line of its own, above the bar."""
        self.console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    def show(self, step: int, figures: Mapping[str, float]) -> None:
        """Show that ``step`` has ended; ``figures`` have ``loss``, and ``tokens`` where they are counted."""
        self._ends.append((time.perf_counter(), figures.get("tokens", 0.0)))
        text, pace = f"{self.title}  loss {figures['loss']:.3f}", self._pace(step)
        self.update(self._task, completed=step, description=text, pace=pace)
        now = self._ends[-1][0]
        if pace and not self.console.is_terminal and now - self._said >= SECONDS_A_LINE:
            self._said = now
            self.say(f"{text}  step {step} of {self.steps}  {pace}")

    def _pace(self, step: int) -> str:
        """What the last steps say; "" after the first one, which also warms up."""
        if len(self._ends) < 2:
            return ""
        (begin, _), *later = self._ends
        seconds = max(later[-1][0] - begin, 1e-9)
        tokens = sum(count for _, count in later) / seconds
        left = timedelta(seconds=round((self.steps - step) * seconds / len(later)))
        return (f"{tokens:,.0f} tokens/s  " if tokens else "") + f"ETA {left}"


def slow_hint(seconds: float, model: torch.nn.Module, sizes: Mapping[str, int]) -> str:
    """What makes a slow step on a CPU faster; "" where the step is not slow, or nothing can be done.

    ``sizes``: options that make a step smaller, and what they are; 0 is no limit.
    """
    if seconds < SLOW_STEP or next(model.parameters()).device.type != "cpu":
        return ""
    threads, cores = torch.get_num_threads(), _usable_cores()
    fixes = [f"--threads {cores} (now {threads})"] if threads < cores else []
    smaller = [f"{name} (now {size or 'all'})" for name, size in sizes.items() if size != 1]
    if smaller:
        fixes.append(f"with --restart a smaller {' or '.join(smaller)}")
    if not fixes:
        return ""
    return f"a step takes {seconds:.0f} s on this CPU; to make it faster give {', or '.join(fixes)}"


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
