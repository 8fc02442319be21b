"""One answer as it is generated, plainly and with a method, side by side; what the drafter guessed is green."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vllm_crossspec.cli.processes import started
from vllm_crossspec.cli.rows import PLAIN
from vllm_crossspec.cli.runner import Job, Prompt
from vllm_crossspec.names import counted

DRAFTED = "bold green"
PICTURE_WIDTH = 110
"""Columns of the picture."""


@dataclass
class Shown:
    """What a method has written so far. A step is a pass of the target, the one for the prompt included."""

    method: str
    text: Text = field(default_factory=Text)
    num_tokens: int = 0
    num_steps: int = 0
    seconds: float = 0.0

    @property
    def speed(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0

    def facts(self, plain: "Shown") -> str:
        """Speed, tokens a round, and how much faster than plain."""
        if not self.num_tokens:
            return "starting" if self.seconds == 0 else "nothing"
        a_round = (self.num_tokens - 1) / (self.num_steps - 1) if self.num_steps > 1 else 1.0
        said = f"{counted(self.num_tokens, 'token')} in {self.seconds:.1f} s, {self.speed:.1f} a second"
        times = f", {self.speed / plain.speed:.2f} times plain" if self is not plain and plain.speed else ""
        return f"{said}, {a_round:.2f} a round{times}"


def show(jobs: Sequence[Job], prompts: Sequence[Prompt], number: int, picture: Path | None) -> list[Shown]:
    """Have every job answer one prompt, and print it: live on a terminal, elsewhere once at the end.

    Args:
        number: of the prompt, from 1.
        picture: file that it is also drawn to, as SVG.
    """
    if number > len(prompts):
        raise ValueError(f"--show {number}: there are {counted(len(prompts), 'prompt')}")
    prompt = replace(prompts[number - 1], turns=prompts[number - 1].turns[:1])
    shown = [Shown(job.method) for job in jobs]
    with Live(console=Console(), auto_refresh=False, vertical_overflow="visible") as live:
        for job, one in zip(jobs, shown, strict=True):
            live.update(_drawn(prompt, shown), refresh=True)
            with started(job.method, replace(job, prompts=[prompt]).as_message()) as engine:
                for event in engine.follow(show=True):
                    if event["event"] == "text":
                        one.text.append(event["drafted"], DRAFTED).append(event["own"])
                        one.num_tokens, one.seconds, one.num_steps = (
                            event["num_tokens"],
                            event["seconds"],
                            event["step"],
                        )
                        live.update(_drawn(prompt, shown), refresh=True)
    if picture is not None:
        paper = Console(record=True, width=PICTURE_WIDTH, file=io.StringIO(), force_terminal=True)
        paper.print(_drawn(prompt, shown))
        svg = paper.export_svg(title="crossspec demo", unique_id="crossspec")
        # Without the fonts that rich would have a reader's browser fetch.
        picture.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))
    return shown


def _drawn(prompt: Prompt, shown: Sequence[Shown]) -> RenderableType:
    answers = Table.grid(expand=True)
    for _ in shown:
        answers.add_column(ratio=1)
    answers.add_row(*(Panel(one.text, title=one.method, height=None) for one in shown))
    facts = [Text(f"{one.method}: {one.facts(shown[0])}") for one in shown]
    legend = Text.assemble(("green", DRAFTED), " tokens were guessed by the drafter, the others are the target's own.")
    return Group(Text(prompt.turns[0], style="bold"), answers, *facts, *([legend] if shown[-1].method != PLAIN else []))
