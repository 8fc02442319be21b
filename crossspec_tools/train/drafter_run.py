"""The training of a drafter of any kind: a claim on the folder, the loop, evaluations, the report."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import torch

from crossspec_tools.train.acceptance import DraftFn, measure, report
from crossspec_tools.train.generations import Batch, Generation, claim, generation_batches, read_generations
from crossspec_tools.train.loop import Trainer
from crossspec_tools.train.recipes import LoopConfig, Recipe
from crossspec_tools.train.states import FrozenTarget, load_ends, load_target, target_settings
from crossspec_tools.train.stored import Wanted, states_path
from vllm_crossspec.kinds.identity import identify

MAY_CHANGE = ("steps", "anchors_per_row", "replicas", "states")
"""Settings that may differ where a run resumes with more steps."""
SIZES = {"--rows-per-step": "rows_per_step", "--anchors": "anchors_per_row"}
"""Options that make a step smaller, and their fields; not every recipe has them all."""


class Run(NamedTuple):
    """What a command of ``crossspec train`` names: two folders to read, one to write, and how."""

    data: Path
    target_folder: Path
    out: Path
    config: Recipe
    loop: LoopConfig


class Trainee(NamedTuple):
    """A drafter that is being trained."""

    title: str  # of the bar and the report
    model: torch.nn.Module
    # of one batch, with the figures to log
    loss: Callable[[Batch, torch.Generator], tuple[torch.Tensor, dict[str, float]]]
    draft: DraftFn  # what it drafts for the held-out acceptance, `acceptance.DraftFn`; on the target's device
    num_drafts: int  # tokens of a draft
    write: Callable[[Path], None]  # writes the drafter as it is now


def read_responses(run: Run, split: str, tap_layers: Sequence[int]) -> list[Generation]:
    """The rows of ``run.data``, with the places of their states where these are stored and the recipe reads them.

    Raises ValueError as :func:`generations.read_generations`.
    """
    wanted, folder = None, run.target_folder
    if run.config.states:
        wanted = Wanted(tuple(tap_layers), identify(str(folder.resolve()), "--target"))
    return read_generations(run.data, split, target_settings(folder).vocab_size, wanted=wanted)


def open_target(run: Run, tap_layers: Sequence[int], device: torch.device) -> FrozenTarget:
    """The target as a teacher. Its layers are not loaded if every response has stored states."""
    shards = [file for split in ("train", "dev") for file in run.data.glob(f"{split}-*.jsonl.gz")]
    if run.config.states and all(states_path(file).is_file() for file in shards):
        model = load_ends(run.target_folder, device)
    else:
        model, _ = load_target(run.target_folder, torch.float32, device)
    return FrozenTarget(model, tap_layers, run.config.bfloat16, target_settings(run.target_folder))


def train_drafter(run: Run, trainee: Trainee, target: FrozenTarget, rows: list[Generation]) -> dict[str, float]:
    """Train on ``rows``, and measure on the ``dev-*`` generations in ``run.data``; resumes from ``out/state.pt``.

    Another device may resume the run. Returns the held-out acceptance at the end, also in ``out/acceptance.json``; it
    is empty without ``dev-*`` shards.
    """
    data, target_folder, out, config, loop = run
    if loop.epochs:  # at least one step, which then says that there are too few rows
        loop = replace(loop, steps=max(1, loop.epochs * (len(rows) // config.rows_per_step)), epochs=0)
    has_dev = list(data.glob("dev-*.jsonl.gz"))
    held_out = read_responses(run, "dev", target.tap_layers) if has_dev else []

    def evaluate(most: int | None = config.eval_rows) -> dict[str, float]:
        trainee.write(out / "model")
        return offline_acceptance(trainee.model, target, held_out[:most], trainee.draft, trainee.num_drafts)

    recipe = asdict(config) | asdict(loop) | {"data": str(data.resolve()), "target": str(target_folder.resolve())}
    claim(out, "recipe.json", recipe, may_change=MAY_CHANGE)
    stream = generation_batches(rows, config.rows_per_step, loop.seed)

    def loss(_: torch.nn.Module, batch: Batch, generator: torch.Generator) -> tuple[torch.Tensor, dict[str, float]]:
        value, figures = trainee.loss(batch.to(target.device), generator)
        return value, {"tokens": int(batch.ends.sum()), **figures}

    sizes = {option: getattr(config, field) for option, field in SIZES.items() if hasattr(config, field)}
    Trainer(trainee.model, stream, loss, out, loop, evaluate).run(trainee.title, sizes=sizes)
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
