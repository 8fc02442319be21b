"""`crossspec train`: a target, its responses, the drafters that guess them, and the router that chooses among these."""

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from crossspec_tools.records.cli_router import CorrectOption, CostOptions, load
from crossspec_tools.train import cli_options as shared
from crossspec_tools.train.cli_drafters import TRAINERS
from crossspec_tools.train.recipes import GenerateConfig, LoopConfig, RouterConfig, options_of
from crossspec_tools.train.stopping import stoppable
from vllm_crossspec.cli.options import Engines, MemoryShare, TensorParallel, grouped
from vllm_crossspec.cli.stages import grid, wide_console
from vllm_crossspec.cli.usage import App
from vllm_crossspec.names import counted

app = App(
    help="""Train a small target and its drafters, or drafters for a target of your own.

    The order of work:

    1. `crossspec train target --data TEXT --out work/target` makes the pocket target (skip it for your own).
    2. `crossspec train generate --data TEXT --target work/target/model --out work/responses` lets the target answer
       the prompts: drafters learn from the text that they will have to guess. With `--states` the steps after it
       read the target's states instead of running it, which is most of what a step costs.
    3. `crossspec train eagle3 --data work/responses --target work/target/model --out work/eagle3` and
       `crossspec train dflash`, `dart` and `draft-model` alike.
    4. `crossspec train confu --start work/eagle3/model --data work/responses --target work/target/model
       --out work/confu`, which goes on from an EAGLE-3 drafter.
    5. `crossspec train router --records work/records --out work/router`, from what `crossspec collect` recorded.

    TEXT is a folder of `train-*.jsonl[.gz]` (and `dev-*.jsonl[.gz]`, held out), one row a line, with `prompt`,
    `response` and `category`. Every command is seeded, shows its progress, goes on where it was stopped when it is
    started again with the same settings, and leaves `loss.png`, `log.jsonl` and a Hugging Face folder `model` in
    `--out`."""
)


@app.command("target")
def train_target_command(
    data: shared.Data,
    out: shared.Out,
    text: Annotated[
        list[Path] | None,
        Option(help="Folder of sources or documentation to learn from beside the rows; may be repeated."),
    ] = None,
    steps: Annotated[int, Option(min=1, help=shared.STEPS)] = 2200,
    lr: Annotated[float, Option(min=0.0, help=shared.RATE)] = 3e-3,
    seed: shared.Seed = 0,
    threads: shared.Threads = 0,
    resume: shared.Resume = True,
) -> None:
    """Train the pocket target: a byte-level BPE of 4096 tokens and a Qwen3-architecture model of 7 million weights.

    The defaults are the shipped model's recipe, about an hour on two cores. It was trained on the rows and, through
    `--text`, on the standard library of Python and the documentation packages of the system.
    """
    shared.check_folder("--data", data, "give a folder of train-*.jsonl[.gz] rows")
    for folder in text or []:
        shared.check_folder("--text", folder, "give a folder of text files")
    shared.begin(out, threads, resume)
    with stoppable(out / "state.pt", resume):
        from crossspec_tools.train.target import TargetConfig, train_target

        loop = LoopConfig(steps=steps, lr=lr, seed=seed, save_every=55, eval_every=220)
        train_target(data, out, TargetConfig(), loop, text or [])
    sys.stdout.write(
        f"target in {out / 'model'}\nserve it with vllm serve {shlex.quote(str((out / 'model').resolve()))}\n"
    )


@app.command("generate")
@grouped
def generate_command(
    *,
    data: shared.Data,
    target: shared.Target,
    out: shared.Out,
    recipe: options_of(GenerateConfig),  # type: ignore[valid-type]
    engines: Engines = 1,
    tensor_parallel_size: TensorParallel = None,
    gpu_memory_utilization: MemoryShare = None,
    resume: shared.Resume = True,
) -> None:
    """Let the target answer the prompts of `--data`, in shards of token ids, by vLLM.

    Greedy, except for a `--sampled-share` of the training prompts. A stopped run resumes with the first missing shard.

    With `--states` the target's hidden states are stored beside the shards. They take 2 bytes for each layer of
    `--state-layers` and the last, times the hidden size, a token; a shard of prompts then holds 1 GiB at most.
    """
    shared.check_folder("--data", data, "give a folder of train-*.jsonl[.gz] rows")
    shared.check_folder("--target", target, "give the Hugging Face folder of the target")
    shared.check_target(target)
    if out.resolve() == data.resolve():
        raise ValueError(f"--out {out} is --data too; give the responses a folder of their own")
    shared.begin(out, 0, resume)
    from crossspec_tools.devices import choose_device
    from crossspec_tools.train.generate import generate

    if recipe.dtype == "auto" and choose_device("auto").type == "cpu":
        recipe = recipe._replace(dtype="float32")
    engine = {"tensor_parallel_size": tensor_parallel_size, "gpu_memory_utilization": gpu_memory_utilization}
    tokens = generate(data, target, out, GenerateConfig(**recipe._asdict()), engines, **engine)
    sys.stdout.write(f"{counted(tokens, 'new response token')} in {out}\n")


for kind, trainer in TRAINERS.items():
    app.command(kind.replace("_", "-"))(trainer.command(kind))


@app.command("router")
@grouped
def train_router_command(
    *,
    records: Annotated[
        list[Path],
        Option(
            help="Folder that `crossspec collect` wrote, finished or not. May be repeated: greedy and sampled answers "
            "of the same prompts, say, which are then held out together."
        ),
    ],
    out: Annotated[Path, Option(help="Folder of the router: router.json and model.safetensors.")],
    drafters: Annotated[
        str | None, Option(help="Comma-separated names, to route between some of the recorded drafters only.")
    ] = None,
    recipe: options_of(RouterConfig),  # type: ignore[valid-type]
    transfer: Annotated[
        bool,
        Option(
            help="First leave out every category in turn: epochs and thresholds are then those that are best for the "
            "one that fares worst, and OUT/reliability.png shows predicted beside seen gains. As many trainings more.",
        ),
    ] = False,
    correct: CorrectOption = True,
    costs: CostOptions,
    threads: shared.Threads = 0,
) -> None:
    """Train the neural router of WhiFlash: by how many tokens each drafter would beat the reference, the last one.

    Prints, for held-out texts, the share of the gains' variance that it explains and the acceptance lengths of single
    drafters, routers and oracles; with costs tokens a second, too. Seconds of work for the pocket models. It is only as
    good elsewhere as its records are like what it will meet: collect them from prompts that no drafter learned from.

    Example: crossspec train router --records work/records --out work/router --epochs 8 --transfer
    """
    if recipe.weighting not in ("uniform", "visits"):
        raise ValueError(f"--weighting {recipe.weighting}: choose uniform or visits")
    if transfer and recipe.patience:
        raise ValueError("--transfer says after how many epochs to end, and so does --patience: give one of them")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; name a folder")
    with stoppable(None):
        import torch

        from crossspec_tools.train.router import train_router
        from vllm_crossspec.routing.checkpoint import save_router

        if threads:
            torch.set_num_threads(threads)
        data, value, *_ = load(records, drafters, None, costs)
        config = RouterConfig(**recipe._asdict())
        carried = _leave_kinds_out(data, config, value, out, correct) if transfer else None
        checkpoint, report = _with_bar(
            train_router, "router", data, config, value=value, carried=carried, correct=correct
        )
        save_router(out, checkpoint)
    _show(report)
    sys.stdout.write(f"router in {out}\n")
    if report.has_learned:
        sys.stdout.write(f"serve it with {json.dumps(_served(records[0], data.facts.drafters, out))}\n")
    else:
        sys.stdout.write("this router has learned nothing; collect more records\n")


def _show(report: Any) -> None:
    """The held-out figures of a router."""
    r2 = ", ".join(f"{share:+.3f}" for share in report.r2)
    sys.stdout.write(
        f"held out: {counted(report.num_texts, 'text')}, {counted(report.num_records, 'record')}; "
        f"R^2 of the gains {r2}\n"
    )
    for name, length in report.lengths.items():
        speed = f"  {report.speeds[name]:10.2f} tokens/s" if report.speeds else ""
        sys.stdout.write(f"  {name:16s} {length:.3f} tokens a round{speed}\n")


def _served(records: Path, drafters: Sequence[str], out: Path) -> dict[str, Any]:
    """The config of a server with this router and the drafters of the records; without these where it lacks one."""
    router = {"router": {"policy": "neural", "model": str(out.resolve())}}
    found = json.loads((records / "records.json").read_text()).get("speculative_config", {})
    known = found.get("drafters", {})
    chosen = {name: known[name] for name in drafters if name in known}
    if len(chosen) < len(drafters) or any(one.get("of", name) not in chosen for name, one in chosen.items()):
        return router
    return {**found, "drafters": chosen, **router}


def _leave_kinds_out(data: Any, config: Any, value: Any, out: Path, correct: bool) -> Any:
    """What carries over to unseen kinds of text, with a table and a picture of it."""
    from crossspec_tools.train.calibration import groups_of
    from crossspec_tools.train.pictures import draw_reliability
    from crossspec_tools.train.router import gains_of, rows_of
    from crossspec_tools.train.transfer import leave_kinds_out

    found = _with_bar(leave_kinds_out, "each category left out", data, config, value, correct=correct)
    thresholds = ", ".join(f"{threshold:g}" for threshold in found.thresholds)
    table = grid(
        f"{value.name} of categories that the router has not seen, threshold {thresholds}",
        ("category", "texts", "R^2", "best drafter", "alone", "routed", "of it", "by the others", "oracle-token"),
        left=("category", "best drafter"),
        caption="of it: routed over alone; by the others: the same with the threshold that the other categories chose",
        caption_justify="left",
    )
    for category, kind in found.kinds.items():
        r2 = ", ".join(f"{share:+.2f}" for share in kind.r2)
        worth = [f"{number:.2f}" for number in (kind.single, kind.routed)]
        ratios = [f"{number / kind.single:.3f}" for number in (kind.routed, kind.foreign)]
        table.add_row(category, str(kind.num_texts), r2, kind.best, *worth, *ratios, f"{kind.oracle:.2f}")
    wide_console().print(table)
    sys.stdout.write(f"after {found.carried.epochs} of {counted(config.epochs, 'epoch')}\n")
    kinds = {
        category: rows_of(data, [data.texts[index] for index in texts]) & data.is_complete
        for category, texts in groups_of(data).items()
    }
    out.mkdir(parents=True, exist_ok=True)
    draw_reliability(found.gains, gains_of(data), kinds, data.facts.drafters, out / "reliability.png")
    return found.carried


def _with_bar(train: Callable[..., Any], name: str, *arguments: Any, **more: Any) -> Any:
    """What ``train`` returns, under a progress bar that shows the held-out error."""
    from rich.progress import Progress

    with Progress() as progress:
        task = progress.add_task(name)

        def step(done: int, total: int, error: float | None) -> None:
            text = name if error is None else f"{name}  held-out error {error:.3f}"
            progress.update(task, completed=done, total=total, description=text)

        return train(*arguments, progress=step, **more)
