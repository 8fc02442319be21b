"""One answer as it is generated, plainly and with a method, side by side; what the drafter guessed is green."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from vllm_crossspec.cli.processes import started
from vllm_crossspec.cli.rows import PLAIN
from vllm_crossspec.cli.runner import Job, Prompt
from vllm_crossspec.names import counted

DRAFTED, COUNTED = "bold green", ("num_tokens", "step", "seconds")


@dataclass
class Shown:
    """What a method has written so far."""

    method: str
    text: Text = field(default_factory=Text)
    num_tokens: int = 0
    step: int = 0
    seconds: float = 0.0

    def facts(self, plain: "Shown") -> str:
        """Speed, tokens a round, and how much faster than plain."""
        if not self.num_tokens:
            return "no token yet"
        speed, a_round = self.num_tokens / self.seconds, (self.num_tokens - 1) / max(self.step - 1, 1)
        is_plain = self is plain or not plain.num_tokens
        times = "" if is_plain else f", {speed / plain.num_tokens * plain.seconds:.2f} times plain"
        said = f"{counted(self.num_tokens, 'token')} in {self.seconds:.1f} s"
        return f"{said}, {speed:.1f} a second, {a_round:.2f} a round{times}"


def show(jobs: Sequence[Job], prompts: Sequence[Prompt], number: int) -> list[Shown]:
    """Have every job answer a prompt, by its number from 1, and print it: live on a terminal, elsewhere at the end."""
    if number > len(prompts):
        raise ValueError(f"--show {number}: there are {counted(len(prompts), 'prompt')}")
    prompt = replace(prompts[number - 1], turns=prompts[number - 1].turns[:1])
    shown = [Shown(job.method) for job in jobs]
    with Live(console=Console(), auto_refresh=False, vertical_overflow="visible") as live:
        for job, one in zip(jobs, shown, strict=True):
            live.update(drawn(prompt, shown), refresh=True)
            with started(job.method, replace(job, prompts=[prompt]).as_message()) as engine:
                for event in engine.follow(show=True):
                    if event["event"] == "text":
                        one.text.append(event["drafted"], DRAFTED).append(event["own"])
                        one.num_tokens, one.step, one.seconds = (event[key] for key in COUNTED)
                        live.update(drawn(prompt, shown), refresh=True)
    return shown


def drawn(prompt: Prompt, shown: Sequence[Shown]) -> RenderableType:
    """The prompt, the answers side by side, and a line about each."""
    answers = Table.grid(*(Column(ratio=1) for _ in shown), expand=True)
    answers.add_row(*(Panel(one.text, title=one.method) for one in shown))
    facts = [Text(f"{one.method}: {one.facts(shown[0])}") for one in shown]
    legend = Text.assemble(("green", DRAFTED), " tokens were guessed by the drafter, the others are the target's own.")
    return Group(Text(prompt.turns[0], style="bold"), answers, *facts, *([legend] if shown[-1].method != PLAIN else []))
