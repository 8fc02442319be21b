"""What training a drafter is, whichever its kind: options, a claim on the folder, the loop, evaluations, the report."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from vllm_crossspec.training.acceptance import DraftFn, measure, report
from vllm_crossspec.training.generations import Batch, Generation, claim, generation_batches, read_generations
from vllm_crossspec.training.loop import LoopConfig, Trainer
from vllm_crossspec.training.states import FrozenTarget

MAY_CHANGE = ("steps", "anchors_per_row", "replicas")
"""What may be others in a run that goes on with more steps: how many, and the places of responses that it draws."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What every drafter's training is told; its shape and its own are added below.

    Attributes:
        intermediate_size: of the MLPs.
        teacher_temperature: the target's distribution is sharpened with it; 1 is the target's own.
        rows_per_step: responses of one optimizer step.
        bfloat16: compute under bfloat16 autocast (weights stay float32).
        eval_rows: at most so many held-out responses.
    """

    intermediate_size: int = 1024
    teacher_temperature: float = 1.0
    rows_per_step: int = 16
    bfloat16: bool = True
    eval_rows: int = 96


class Run(NamedTuple):
    """What a command of ``crossspec train`` names: two folders to read, one to write, and how."""

    data: Path
    target_folder: Path
    out: Path
    config: Recipe
    loop: LoopConfig


class Trainee(NamedTuple):
    """A drafter that is being trained.

    Attributes:
        title: of the bar and the report.
        loss: of one batch, with the figures to log.
        draft: what it drafts for the held-out acceptance, :data:`acceptance.DraftFn`; on the target's device.
        num_drafts: tokens of a draft.
        write: writes the drafter as it is now.
    """

    title: str
    model: torch.nn.Module
    loss: Callable[[Batch, torch.Generator], tuple[torch.Tensor, dict[str, float]]]
    draft: DraftFn
    num_drafts: int
    write: Callable[[Path], None]


def train_drafter(run: Run, trainee: Trainee, target: FrozenTarget, rows: list[Generation]) -> dict[str, float]:
    """Train on ``rows``, and measure on the ``dev-*`` generations in ``run.data``; goes on from ``out/state.pt``.

    The device (``cpu``, ``cuda`` or ``auto``) is no part of what the run is, so that it may go on elsewhere.

    Args:
        rows: the ``train-*`` generations in ``run.data``.

    Returns:
        The held-out acceptance at the end, also in ``out/acceptance.json`` (empty without ``dev-*`` shards).
    """
    data, target_folder, out, config, loop = run
    if loop.epochs:  # at least one step, which then says that there are too few rows
        loop = replace(loop, steps=max(1, loop.epochs * (len(rows) // config.rows_per_step)), epochs=0)
    has_dev = list(data.glob("dev-*.jsonl.gz"))
    held_out = read_generations(data, "dev", target.config.vocab_size) if has_dev else []

    def evaluate(most: int | None = config.eval_rows) -> dict[str, float]:
        trainee.write(out / "model")
        return offline_acceptance(trainee.model, target, held_out[:most], trainee.draft, trainee.num_drafts)

    recipe = asdict(config) | asdict(loop) | {"data": str(data.resolve()), "target": str(target_folder.resolve())}
    claim(out, "recipe.json", recipe, may_change=MAY_CHANGE)
    stream = generation_batches(rows, config.rows_per_step, loop.seed)
    loss = lambda _, batch, generator: trainee.loss(batch.to(target.device), generator)  # noqa: E731
    Trainer(trainee.model, stream, loss, out, loop, evaluate).run(trainee.title)
    return report(trainee.title, evaluate(None), out / "acceptance.json")


def offline_acceptance(
    model: torch.nn.Module, target: FrozenTarget, rows: list[Generation], draft: DraftFn, num_drafts: int
) -> dict[str, float]:
    """Held-out acceptance of what ``draft`` lets the drafter say, as chains; see :func:`acceptance.measure`."""
    model.eval()

    def on_device(batch: Batch, anchors: torch.Tensor) -> torch.Tensor:
        with target.autocast():
            return draft(batch.to(target.device), anchors.to(target.device)).cpu()

    return measure(rows, on_device, num_drafts)
