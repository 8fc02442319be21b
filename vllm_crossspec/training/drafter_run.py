"""What training a drafter is, whichever its kind: a claim on the folder, the loop, its evaluations and the report."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vllm_crossspec.training.acceptance import report
from vllm_crossspec.training.generations import Batch, Generation, claim, generation_batches, read_generations
from vllm_crossspec.training.loop import LoopConfig, Trainer

MAY_CHANGE = ("steps", "anchors_per_row", "replicas")
"""What may be others in a run that goes on with more steps: how many, and the places of responses that it draws."""

Loss = Callable[[Batch, torch.Generator], tuple[torch.Tensor, dict[str, float]]]


def run_training(
    title: str,
    model: torch.nn.Module,
    *,
    rows: list[Generation],
    data: Path,
    target_folder: Path,
    vocab_size: int,
    out: Path,
    config: Any,
    loop: LoopConfig,
    place: torch.device,
    loss: Loss,
    write: Callable[[], None],
    acceptance: Callable[[list[Generation]], dict[str, float]],
) -> dict[str, float]:
    """Train on ``rows``, and measure on the ``dev-*`` generations in ``data``; goes on from ``out/state.pt``.

    Args:
        title: of the bar and the report.
        rows: the ``train-*`` generations in ``data``.
        vocab_size: of the target, which the generations must fit.
        config: the drafter's dataclass, with ``rows_per_step`` and ``eval_rows``; part of what the run is.
        place: where batches go.
        loss: of one batch, with the figures to log.
        write: writes the drafter as it is now.
        acceptance: held-out figures of some rows.

    Returns:
        The held-out acceptance at the end, also in ``out/acceptance.json`` (empty without ``dev-*`` shards).
    """
    held_out = read_generations(data, "dev", vocab_size) if list(data.glob("dev-*.jsonl.gz")) else []

    def evaluate() -> dict[str, float]:
        write()
        return acceptance(held_out[: config.eval_rows])

    recipe = asdict(config) | asdict(loop) | {"data": str(data.resolve()), "target": str(target_folder.resolve())}
    claim(out, "recipe.json", recipe, may_change=MAY_CHANGE)
    stream = generation_batches(rows, config.rows_per_step, loop.seed)
    Trainer(model, stream, lambda _, b, g: loss(b.to(place), g), out, loop, evaluate).run(title)
    write()
    return report(title, acceptance(held_out), out / "acceptance.json")
