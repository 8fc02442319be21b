"""Draws docs/figures/demo.svg: one answer of the pocket target, plainly and with a tree, as the demo shows it."""

import io
import os
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from vllm_crossspec.cli.demo import demo_prompts, job_of
from vllm_crossspec.cli.models import POCKET
from vllm_crossspec.cli.prompts import read_prompts
from vllm_crossspec.cli.runner import Prompt
from vllm_crossspec.cli.show import Shown, drawn, show

METHODS, PROMPT, FILE = ("plain", "eagle3-tree"), 13, Path("docs/figures/demo.svg")


def picture(prompt: Prompt, shown: Sequence[Shown]) -> str:
    """The SVG, without the fonts that rich would have a reader's browser fetch."""
    paper = Console(record=True, width=110, file=io.StringIO(), force_terminal=True)
    paper.print(drawn(prompt, shown))
    svg = paper.export_svg(title="crossspec demo", unique_id="crossspec")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    os.environ.setdefault("CROSSSPEC_FIXED_WIDTHS", "1")  # whole trees, as in the demo
    asked, sampling = read_prompts(demo_prompts()), {"temperature": 0.0, "max_tokens": 64}
    jobs = [job_of(m, POCKET.methods[m], POCKET.find(), asked, sampling, max_num_seqs=1) for m in METHODS]
    FILE.write_text(picture(asked[PROMPT - 1], show(jobs, asked, PROMPT)))
