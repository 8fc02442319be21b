"""The picture of `crossspec demo`: one answer of the pocket target, plainly and with a tree of drafts, as SVG.

Usage: python benchmarks/demo_picture.py --out docs/figures/demo.svg
"""

import argparse
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from vllm_crossspec.cli.demo import job_of
from vllm_crossspec.cli.models import choose_set
from vllm_crossspec.cli.prompts import read_prompts
from vllm_crossspec.cli.runner import Prompt
from vllm_crossspec.cli.show import Shown, drawn, show

COLUMNS = 110


def picture(prompt: Prompt, shown: Sequence[Shown]) -> str:
    """The SVG, without the fonts that rich would have a reader's browser fetch."""
    paper = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    paper.print(drawn(prompt, shown))
    svg = paper.export_svg(title="crossspec demo", unique_id="crossspec")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default="pocket", help="the set of models")
    parser.add_argument("--method", default="eagle3-tree")
    parser.add_argument("--prompt", type=int, default=1, help="its number in the set's prompts")
    parser.add_argument("--max-tokens", type=int, default=64)
    given = parser.parse_args()
    models = choose_set(given.models)
    if not models.is_timed:
        os.environ.setdefault("CROSSSPEC_FIXED_WIDTHS", "1")  # whole trees, as in the demo
    prompts = read_prompts(models.find() / "prompts.jsonl")
    sampling = {"temperature": 0.0, "max_tokens": given.max_tokens}
    engine = {"model": str(models.target()), "max_num_seqs": 1}
    methods = {name: models.methods[name] for name in ("plain", given.method)}
    jobs = [job_of(name, config, models.find(), prompts, sampling, **engine) for name, config in methods.items()]
    shown = show(jobs, prompts, given.prompt)
    if len({one.text.plain for one in shown}) > 1:
        raise SystemExit("the texts differ")
    given.out.write_text(picture(prompts[given.prompt - 1], shown))


if __name__ == "__main__":
    main()
