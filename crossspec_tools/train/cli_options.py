"""What the commands of `crossspec train` share: their options, and the checks before anything heavy is imported."""

import importlib.util
import json
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from typer import Option

Data = Annotated[Path, Option(help="Folder of train-*.jsonl[.gz] and dev-*.jsonl[.gz] rows of text.")]
Responses = Annotated[Path, Option(help="Folder that `crossspec train generate` wrote for this target.")]
Target = Annotated[Path, Option(help="Hugging Face folder of the target (config.json and safetensors).")]
Out = Annotated[Path, Option(help="Work folder: what is made, and what a stopped run needs to go on.")]
STEPS = "Optimizer steps in all; the rate decays over the last part. A finished run goes on with more."
RATE = "Peak learning rate of Muon (matrices) and AdamW (the rest)."
Steps = Annotated[int, Option(min=1, help=STEPS)]
Rate = Annotated[float, Option(min=0.0, help=RATE)]
Seed = Annotated[int, Option(min=0, help="Of weights, data order and every other draw.")]
Threads = Annotated[int, Option(min=0, help="CPU threads; 0 leaves the choice to torch.")]
Resume = Annotated[
    bool, Option("--resume/--restart", help="Go on from the state in --out, or throw it away and begin anew.")
]
Teacher = Annotated[
    float,
    Option(
        min=0.01,
        help="Temperature of the target's distribution to imitate: 1 is its own, 0.1 nearly its first choice alone.",
    ),
]
Rows = Annotated[int, Option(min=1, help="Responses of one optimizer step.")]
Device = Annotated[
    str,
    Option(
        help="cpu, cuda, or auto: a GPU where torch sees one. No GPU was at hand when this was written: what runs "
        "there (FlexAttention, compiled) is tested against the CPU's form of it, but was never run or timed."
    ),
]
Bfloat16 = Annotated[bool, Option("--bfloat16/--float32", help="Of the computation; the weights are float32.")]


class Lessons(NamedTuple):
    """What a drafter learns from: the target's responses, and the target."""

    data: Responses
    target: Target


class Loop(NamedTuple):
    """How the loop runs; what is not given is the recipe's, and else as ``LoopConfig`` has it."""

    epochs: Annotated[int | None, Option(min=1, help="Passes over the responses, in the place of --steps.")] = None
    optimizer: Annotated[
        Literal["muon", "adamw"] | None,
        Option(help="muon: for matrices, AdamW for the rest (default). adamw: for all."),
    ] = None
    beta2: Annotated[float | None, Option(min=0.0, max=0.9999, help="AdamW's second beta; 0.95 by default.")] = None
    schedule: Annotated[
        Literal["linear", "cosine"] | None,
        Option(help="After the warm-up. linear: flat, then falling over the last 40 % (the default). cosine: to 0."),
    ] = None
    weight_decay: Annotated[float | None, Option(min=0.0, help="Of matrices; 0.05 by default.")] = None
    clip: Annotated[float | None, Option(min=0.001, help="Most that a gradient's norm may be; 1 by default.")] = None


class Machine(NamedTuple):
    """How it is computed, and whether a stopped run goes on."""

    device: Device = "auto"
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


def check_model_folder(target: Path) -> None:
    check_folder("--target", target, "give the Hugging Face folder of the target")
    if not (target / "config.json").is_file():
        raise ValueError(f"--target {target} has no config.json; give a Hugging Face model folder")


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
