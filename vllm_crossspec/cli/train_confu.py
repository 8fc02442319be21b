"""`crossspec train confu`: an EAGLE-3 drafter that learns to read futures, and what makes the target tell them."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from vllm_crossspec.cli.train_options import (
    Bfloat16,
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
    begin_drafter,
    check_start,
)


def train_confu_command(
    data: Responses,
    target: Target,
    start: Annotated[
        Path, typer.Option(help="Folder of the EAGLE-3 drafter to go on from; its shape and vocabulary stay.")
    ],
    out: Out,
    steps: Steps = 1500,
    lr: Rate = 2e-3,
    soft_prompts: Annotated[
        int, typer.Option(min=1, help="Learned keys and values in each layer of the target (s).")
    ] = 16,
    experts: Annotated[
        int, typer.Option(min=1, help="Embeddings of each of the two mixtures; 1 is the ablation without.")
    ] = 8,
    top_experts: Annotated[
        int, typer.Option(min=1, help="So many of them are mixed; with 1 the gates learn nothing.")
    ] = 2,
    num_steps: Annotated[int, typer.Option(min=1, help="Drafted tokens that training unrolls (L).")] = 7,
    anchors: Annotated[int, typer.Option(min=1, help="Contemplate tokens of one response in one step (K_train).")] = 24,
    replicas: Annotated[
        int, typer.Option(min=0, help="Places behind an anchor that share its future (l); 0 is the ablation without.")
    ] = 1,
    max_lag: Annotated[
        int, typer.Option(min=0, help="Deepest draft node that contemplates: a round's gate lies so far behind it.")
    ] = 7,
    no_future: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of drafts without a future, as a request's first one is.")
    ] = 0.1,
    future_loss: Annotated[
        float, typer.Option(min=0.0, help="Weight of the futures' own loss: they foretell a token; 0 is the paper's.")
    ] = 0.3,
    new_rate: Annotated[
        float, typer.Option(min=0.01, help="Learning rate of what EAGLE-3 does not have, as a multiple of --lr.")
    ] = 2.0,
    teacher_temperature: Teacher = 1.0,
    rows_per_step: Rows = 16,
    bfloat16: Bfloat16 = True,
    device: Device = "auto",
    seed: Seed = 0,
    threads: Threads = 0,
    resume: Resume = True,
) -> None:
    """Train a ConFu drafter from an EAGLE-3 drafter (`--start`).

    The target stays as it is. What is learned: soft prompts and contemplate tokens, which make it predict where a text
    goes, and a drafter that reads this future. To see what futures are worth, compare with an EAGLE-3 drafter that
    trained for as long: `crossspec train eagle3 --start`, with the same `--steps`. The drafter works with this target
    alone. Prints and stores (`acceptance.json`) the tokens a round on the held-out responses.
    """
    check_start(start)
    if top_experts > experts:
        raise ValueError(f"--top-experts {top_experts} must be at most --experts {experts}, of which they are chosen")
    begin_drafter(data, target, out, threads, resume)
    from vllm_crossspec.training.confu import ConfuConfig, train_confu
    from vllm_crossspec.training.loop import LoopConfig

    config = ConfuConfig(
        start=str(start.resolve()),
        num_steps=num_steps,
        teacher_temperature=teacher_temperature,
        rows_per_step=rows_per_step,
        anchors_per_row=anchors,
        bfloat16=bfloat16,
        num_soft_prompts=soft_prompts,
        num_experts=experts,
        top_experts=top_experts,
        replicas=replicas,
        max_lag=max_lag,
        no_future=no_future,
        future_loss=future_loss,
        new_rate=new_rate,
    )
    train_confu(data, target, out, config, LoopConfig(steps=steps, lr=lr, seed=seed), device)
    sys.stdout.write(f"drafter in {out / 'model'}\n")
