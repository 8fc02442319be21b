"""Draws docs/figures/demo.svg: one answer of SmolLM2, plainly and with a drafter, as the demo shows it."""

import io
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from vllm_crossspec.cli.demo import job_of
from vllm_crossspec.cli.models import choose_set
from vllm_crossspec.cli.prompts import read_prompts
from vllm_crossspec.cli.runner import Prompt
from vllm_crossspec.cli.show import Shown, drawn, show

METHODS, PROMPT, FILE = ("plain", "eagle3"), 13, Path("docs/figures/demo.svg")


def picture(prompt: Prompt, shown: Sequence[Shown]) -> str:
    """The SVG, without the fonts that rich would have a reader's browser fetch."""
    paper = Console(record=True, width=110, file=io.StringIO(), force_terminal=True)
    paper.print(drawn(prompt, shown))
    svg = paper.export_svg(title="crossspec demo", unique_id="crossspec")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    models = choose_set("smollm2")
    folder, engine = models.find(), {"model": str(models.target()), "max_num_seqs": 1}
    asked, sampling = read_prompts(folder / "prompts.jsonl"), {"temperature": 0.0, "max_tokens": 64}
    jobs = [job_of(m, models.methods[m], folder, asked, sampling, **engine) for m in METHODS]
    FILE.write_text(picture(asked[PROMPT - 1], show(jobs, asked, PROMPT)))
