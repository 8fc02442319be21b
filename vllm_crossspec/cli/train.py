"""`crossspec train`: a target, its responses, the drafters that guess them, and the router that chooses among these."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from vllm_crossspec.cli.train_confu import train_confu_command
from vllm_crossspec.cli.train_options import (
    Bfloat16,
    Data,
    Device,
    Out,
    Rate,
    Responses,
    Resume,
    Rows,
    Seed,
    Steps,
    Target,
    Teacher,
    Threads,
    begin,
    begin_drafter,
    check_folder,
    check_model_folder,
    check_start,
)

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Train a small target and its drafters, or drafters for a target of your own.

    The order of work:

    1. `crossspec train target --data TEXT --out work/target` makes the pocket target (skip it for your own).
    2. `crossspec train generate --data TEXT --target work/target/model --out work/responses` lets the target answer
       the prompts: drafters learn from the text that they will have to guess.
    3. `crossspec train eagle3 --data work/responses --target work/target/model --out work/eagle3` and
       `crossspec train dflash`, `dart` and `draft-model` alike.
    4. `crossspec train confu --start work/eagle3/model --data work/responses --target work/target/model
       --out work/confu`, which goes on from an EAGLE-3 drafter.
    5. `crossspec train router --records work/records --out work/router`, from what `crossspec collect` recorded.

    TEXT is a folder of `train-*.jsonl[.gz]` (and `dev-*.jsonl[.gz]`, held out), one row a line, with `prompt`,
    `response` and `category`. Every command is seeded, shows its progress, goes on where it was stopped when it is
    started again with the same settings, and leaves `loss.png`, `log.jsonl` and a Hugging Face folder `model` in
    `--out`.""",
)


@app.command("target")
def train_target_command(
    data: Data,
    out: Out,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of sources or documentation to learn from beside the rows; may be repeated."),
    ] = None,
    steps: Steps = 2200,
    lr: Rate = 3e-3,
    seed: Seed = 0,
    threads: Threads = 0,
    resume: Resume = True,
) -> None:
    """Train the pocket target: a byte-level BPE of 4096 tokens and a Qwen3-architecture model of 7 million weights.

    The defaults are the shipped model's recipe, about an hour on two cores. It was trained on the rows and, through
    `--text`, on the standard library of Python and the documentation packages of the system.
    """
    check_folder("--data", data, "give a folder of train-*.jsonl[.gz] rows")
    for folder in text or []:
        check_folder("--text", folder, "give a folder of text files")
    begin(out, threads, resume)
    from vllm_crossspec.training.loop import LoopConfig
    from vllm_crossspec.training.target import TargetConfig, train_target

    loop = LoopConfig(steps=steps, lr=lr, seed=seed, save_every=55, eval_every=220)
    train_target(data, out, TargetConfig(), loop, text or [])
    sys.stdout.write(f"target in {out / 'model'}\n")


@app.command("generate")
def generate_command(
    data: Data,
    target: Target,
    out: Out,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longer prompts are left out.")] = 384,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="A response is cut there.")] = 192,
    sampled_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of the training prompts answered by sampling.")
    ] = 0.2,
    temperature: Annotated[float, typer.Option(min=0.01, help="Of the sampled responses.")] = 0.7,
    batch: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 64,
    max_rows: Annotated[int, typer.Option(min=0, help="At most so many training prompts; 0 takes all.")] = 0,
    seed: Seed = 0,
    workers: Annotated[int, typer.Option(min=1, help="Processes that share the shards.")] = 1,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads of each process; 0 leaves it to torch.")] = 0,
    resume: Resume = True,
) -> None:
    """Let the target answer the prompts of `--data`, in shards of token ids.

    Greedy but for `--sampled-share`; the held-out prompts (`dev-*`) are all answered greedily. A run that was
    stopped goes on with the first shard that is missing.
    """
    check_folder("--data", data, "give a folder of train-*.jsonl[.gz] rows")
    check_model_folder(target)
    if out.resolve() == data.resolve():
        raise ValueError(f"--out {out} is --data too; give the responses a folder of their own")
    begin(out, 0, resume)
    from vllm_crossspec.training.generate import GenerateConfig, generate

    config = GenerateConfig(
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        sampled_share=sampled_share,
        temperature=temperature,
        rows_per_batch=batch,
        max_rows=max_rows,
        seed=seed,
    )
    tokens = generate(data, target, out, config, workers=workers, threads=threads)
    sys.stdout.write(f"{tokens} new response tokens in {out}\n")


@app.command("eagle3")
def train_eagle3_command(
    data: Responses,
    target: Target,
    out: Out,
    steps: Steps = 3000,
    lr: Rate = 2e-3,
    start: Annotated[
        Path | None, typer.Option(help="Folder of a trained EAGLE-3 drafter to go on from, instead of anew.")
    ] = None,
    draft_vocab: Annotated[
        int | None, typer.Option(min=1, help="The most frequent response tokens that it knows; 3072, or --start's.")
    ] = None,
    intermediate_size: Annotated[int | None, typer.Option(min=1, help="Width of its MLP; 768, or --start's.")] = None,
    num_steps: Annotated[int, typer.Option(min=1, help="Drafted tokens that training unrolls.")] = 7,
    teacher_temperature: Teacher = 1.0,
    rows_per_step: Rows = 16,
    anchors: Annotated[int, typer.Option(min=1, help="Drafts of one response in one step.")] = 48,
    bfloat16: Bfloat16 = True,
    device: Device = "auto",
    seed: Seed = 0,
    threads: Threads = 0,
    resume: Resume = True,
) -> None:
    """Train an EAGLE-3 drafter (one layer, SafeAILab's format) by training-time test; the defaults are the pocket one.

    Prints and stores (`acceptance.json`) the tokens a round on the held-out responses.
    """
    if start is not None:
        check_start(start)
        for option, value in (("--draft-vocab", draft_vocab), ("--intermediate-size", intermediate_size)):
            if value is not None:
                raise ValueError(f"{option} {value}: a drafter that goes on from --start keeps its own; leave it out")
    begin_drafter(data, target, out, threads, resume)
    from vllm_crossspec.training.eagle3 import Eagle3Config, train_eagle3
    from vllm_crossspec.training.loop import LoopConfig

    config = Eagle3Config(
        start="" if start is None else str(start.resolve()),
        intermediate_size=intermediate_size or 768,
        draft_vocab_size=draft_vocab or 3072,
        num_steps=num_steps,
        teacher_temperature=teacher_temperature,
        rows_per_step=rows_per_step,
        anchors_per_row=anchors,
        bfloat16=bfloat16,
    )
    train_eagle3(data, target, out, config, LoopConfig(steps=steps, lr=lr, seed=seed), device)
    sys.stdout.write(f"drafter in {out / 'model'}\n")


app.command("confu")(train_confu_command)


@app.command("dflash")
def train_dflash_command(
    data: Responses,
    target: Target,
    out: Out,
    steps: Steps = 3000,
    lr: Rate = 2e-3,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the drafter.")] = 2,
    intermediate_size: Annotated[int, typer.Option(min=1, help="Width of its MLPs.")] = 1024,
    block_size: Annotated[int, typer.Option(min=2, help="The last token and block-size - 1 drafts.")] = 8,
    target_layers: Annotated[int, typer.Option(min=1, help="Layers of the target that it reads.")] = 5,
    decay: Annotated[float, typer.Option(min=0.1, help="Draft i weighs exp(-(i - 1) / decay) in the loss.")] = 4.0,
    teacher_temperature: Teacher = 1.0,
    rows_per_step: Rows = 16,
    anchors: Annotated[int, typer.Option(min=1, help="Blocks of one response in one step.")] = 24,
    bfloat16: Bfloat16 = True,
    device: Device = "auto",
    seed: Seed = 0,
    threads: Threads = 0,
    resume: Resume = True,
) -> None:
    """Train a DFlash drafter (block diffusion, z-lab's format); the defaults are the pocket one.

    Prints and stores (`acceptance.json`) the tokens a round on the held-out responses.
    """
    begin_drafter(data, target, out, threads, resume)
    from vllm_crossspec.training.dflash import DFlashConfig, train_dflash
    from vllm_crossspec.training.loop import LoopConfig

    config = DFlashConfig(
        num_layers=layers,
        intermediate_size=intermediate_size,
        block_size=block_size,
        num_target_layers=target_layers,
        decay=decay,
        teacher_temperature=teacher_temperature,
        rows_per_step=rows_per_step,
        anchors_per_row=anchors,
        bfloat16=bfloat16,
    )
    train_dflash(data, target, out, config, LoopConfig(steps=steps, lr=lr, seed=seed), device)
    sys.stdout.write(f"drafter in {out / 'model'}\n")


@app.command("dart")
def train_dart_command(
    data: Responses,
    target: Target,
    out: Out,
    steps: Steps = 2200,
    lr: Rate = 2e-3,
    draft_vocab: Annotated[int, typer.Option(min=1, help="The most frequent response tokens that it knows.")] = 3072,
    intermediate_size: Annotated[int, typer.Option(min=1, help="Width of its MLP.")] = 1024,
    num_drafts: Annotated[int, typer.Option(min=2, help="Tokens of a draft: an entry and num-drafts - 1 masks.")] = 8,
    gamma: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Draft i weighs gamma^(i - 1) in the loss; the paper's 0.6.")
    ] = 0.6,
    shifted: Annotated[
        bool,
        typer.Option("--shifted/--unshifted", help="Rows predict the token after their place (DART), or their own."),
    ] = True,
    teacher_temperature: Teacher = 1.0,
    rows_per_step: Rows = 16,
    anchors: Annotated[int, typer.Option(min=0, help="Drafts of one response in one step; 0: at every place.")] = 32,
    bfloat16: Bfloat16 = True,
    device: Device = "auto",
    seed: Seed = 0,
    threads: Threads = 0,
    resume: Resume = True,
) -> None:
    """Train a DART drafter (parallel logits, fvliang's format) by annealed KL; the defaults are the pocket one.

    Prints and stores (`acceptance.json`) the tokens a round on the held-out responses, of its first choices alone:
    the n-gram store that joins them into trees is made with `crossspec ngram build`. An `--unshifted` drafter is for
    comparing; no engine decodes with it.
    """
    begin_drafter(data, target, out, threads, resume)
    from vllm_crossspec.training.dart import DartConfig, train_dart
    from vllm_crossspec.training.loop import LoopConfig

    config = DartConfig(
        intermediate_size=intermediate_size,
        draft_vocab_size=draft_vocab,
        num_drafts=num_drafts,
        gamma=gamma,
        is_shifted=shifted,
        teacher_temperature=teacher_temperature,
        rows_per_step=rows_per_step,
        anchors_per_row=anchors,
        bfloat16=bfloat16,
    )
    train_dart(data, target, out, config, LoopConfig(steps=steps, lr=lr, seed=seed), device)
    sys.stdout.write(f"drafter in {out / 'model'}\n")


@app.command("draft-model")
def train_draft_model_command(
    data: Responses,
    target: Target,
    out: Out,
    steps: Steps = 4000,
    lr: Rate = 3e-3,
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers; they begin as layers of the target.")] = 2,
    intermediate_size: Annotated[int, typer.Option(min=1, help="Width of its MLPs.")] = 576,
    teacher_temperature: Teacher = 1.0,
    rows_per_step: Rows = 16,
    bfloat16: Bfloat16 = True,
    device: Device = "auto",
    seed: Seed = 0,
    threads: Threads = 0,
    resume: Resume = True,
) -> None:
    """Distil a small model that drafts by itself (methods `draft_model`, `flashhead`); the defaults are the pocket one.

    It begins as a few layers of the target, which must be a Qwen3 model, and learns the target's distributions over
    its responses. Prints and stores (`acceptance.json`) the tokens a round on the held-out responses.
    """
    begin_drafter(data, target, out, threads, resume)
    from vllm_crossspec.training.draft_model import DraftModelConfig, train_draft_model
    from vllm_crossspec.training.loop import LoopConfig

    config = DraftModelConfig(
        num_layers=layers,
        intermediate_size=intermediate_size,
        teacher_temperature=teacher_temperature,
        rows_per_step=rows_per_step,
        bfloat16=bfloat16,
    )
    train_draft_model(data, target, out, config, LoopConfig(steps=steps, lr=lr, seed=seed), device)
    sys.stdout.write(f"draft model in {out / 'model'}\n")


@app.command("router")
def train_router_command(
    records: Annotated[Path, typer.Option(help="Folder that `crossspec collect` wrote, finished or not.")],
    out: Annotated[Path, typer.Option(help="Folder of the router: router.json and model.safetensors.")],
    drafters: Annotated[
        str | None, typer.Option(help="Comma-separated names, to route between some of the recorded drafters only.")
    ] = None,
    lr: Annotated[float, typer.Option(min=0.0, help="Peak learning rate of AdamW; falls along a cosine.")] = 1e-3,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the records; few records need more.")] = 1,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Records of one optimizer step.")] = 8192,
    dropout: Annotated[float, typer.Option(min=0.0, max=0.9, help="In the middle layer.")] = 0.1,
    weight_decay: Annotated[float, typer.Option(min=0.0, help="Of AdamW.")] = 0.01,
    held_out: Annotated[
        float, typer.Option(min=0.0, max=0.9, help="Share of the texts kept for the report (and for --patience).")
    ] = 0.1,
    patience: Annotated[
        int, typer.Option(min=0, help="End after so many epochs without a better held-out error; 0: never.")
    ] = 0,
    weighting: Annotated[
        str, typer.Option(help="uniform: every token alike, as the paper. visits: by how likely a round begins there.")
    ] = "uniform",
    seed: Seed = 0,
    threads: Threads = 0,
) -> None:
    """Train the neural router of WhiFlash: by how many tokens each drafter would beat the reference, the last one.

    Prints, for held-out texts, the share of the gains' variance that it explains and the acceptance lengths of single
    drafters, routers and oracles. It is a few seconds of work for the pocket models.
    """
    if weighting not in ("uniform", "visits"):
        raise ValueError(f"--weighting {weighting}: choose uniform or visits")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; name a folder")
    import torch
    from rich.progress import Progress

    from vllm_crossspec.router.checkpoint import save_router
    from vllm_crossspec.training.records import choose_drafters, read_records
    from vllm_crossspec.training.router import RouterConfig, train_router

    if threads:
        torch.set_num_threads(threads)
    data = read_records(records)
    if drafters is not None:
        data = choose_drafters(data, [name.strip() for name in drafters.split(",")])
    config = RouterConfig(
        lr=lr,
        epochs=epochs,
        batch_tokens=batch_tokens,
        dropout=dropout,
        weight_decay=weight_decay,
        held_out=held_out,
        patience=patience,
        weighting=weighting,
        seed=seed,
    )
    with Progress() as progress:
        task = progress.add_task("router")

        def step(done: int, total: int, error: float | None) -> None:
            text = "router" if error is None else f"router  held-out error {error:.3f}"
            progress.update(task, completed=done, total=total, description=text)

        checkpoint, report = train_router(data, config, step)
    save_router(out, checkpoint)
    r2 = ", ".join(f"{share:+.3f}" for share in report.r2)
    sys.stdout.write(f"held out: {report.num_texts} texts, {report.num_records} records; R^2 of the gains {r2}\n")
    for name, length in report.lengths.items():
        sys.stdout.write(f"  {name:16s} {length:.3f} tokens a round\n")
    sys.stdout.write(f"router in {out}\n")
