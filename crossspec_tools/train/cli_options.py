"""What the commands of `crossspec train` share: their options, and the checks before anything heavy is imported."""

import importlib.util
import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from typer import Option

Data = Annotated[Path, Option(help="Folder of train-*.jsonl[.gz] and dev-*.jsonl[.gz] rows of text.")]
Target = Annotated[Path, Option(help="Hugging Face folder of the target (config.json and safetensors).")]
Out = Annotated[Path, Option(help="Work folder: what is made, and what a stopped run needs to go on.")]
STEPS = "Optimizer steps in all; the rate decays over the last part. A finished run goes on with more."
RATE = "Peak learning rate of Muon (matrices) and AdamW (the rest)."
Seed = Annotated[int, Option(min=0, help="Of weights, data order and every other draw.")]
Threads = Annotated[int, Option(min=0, help="CPU threads; 0 leaves the choice to torch.")]
Resume = Annotated[
    bool, Option("--resume/--restart", help="Go on from the state in --out, or throw it away and begin anew.")
]


class Lessons(NamedTuple):
    """What a drafter learns from: the target's responses, and the target."""

    data: Annotated[Path, Option(help="Folder that `crossspec train generate` wrote for this target.")]
    target: Target


class Machine(NamedTuple):
    """How it is computed, and whether a stopped run goes on."""

    device: Annotated[
        str,
        Option(
            help="cpu, cuda, or auto: a GPU where torch sees one. No GPU was at hand when this was written: what runs "
            "there (FlexAttention, compiled) is tested against the CPU's form of it, but was never run or timed."
        ),
    ] = "auto"
    seed: Seed = 0
    threads: Threads = 0
    resume: Resume = True


def begin(out: Path, threads: int, resume: bool) -> None:
    """See that the packages of training are there, set the threads, and let a restart forget the stopped run."""
    for package in ("torch", "transformers", "tokenizers", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f'training needs {package}: run `pip install "vllm-crossspec[train]"`')
    import torch

    if threads:
        torch.set_num_threads(threads)
    if not resume:
        stale = [out / "state.pt", out / "recipe.json"]
        if (out / "generate.json").is_file():  # a folder of our own shards, not one of somebody's text
            stale.append(out / "generate.json")
            for suffix in ("jsonl.gz", "states.safetensors"):
                stale += out.glob(f"*-[0-9][0-9][0-9][0-9][0-9].{suffix}")
        for file in stale:
            file.unlink(missing_ok=True)


def check_folder(option: str, folder: Path, needs: str) -> None:
    """Refuse a missing folder before anything heavy is imported."""
    if not folder.is_dir():
        raise ValueError(f"{option} {folder} is not a folder; {needs}")


def check_target(folder: Path) -> None:
    """See that ``folder`` looks like a Hugging Face model. Raises ValueError: no ``config.json``, or no weights."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"--target {folder} has no config.json; give a Hugging Face model folder")
    if not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        raise ValueError(f"--target {folder} has no weights (*.safetensors); give a Hugging Face model folder")


def check_start(start: Path, made: str) -> dict[str, Any]:
    """The ``config.json`` of ``--start``, a folder of a drafter, before anything heavy is imported.

    Raises ValueError: it has none.
    """
    check_folder("--start", start, f"give {made}")
    file = start / "config.json"
    if not file.is_file():
        has_inner = (start / "model" / "config.json").is_file()
        remedy = f"its drafter is in {start / 'model'}" if has_inner else f"give {made}"
        raise ValueError(f"--start {start} has no config.json; {remedy}")
    try:
        settings: dict[str, Any] = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"--start {start}: its config.json is not valid JSON ({error}); give {made}") from None
    return settings
