"""`crossspec train confu`: an EAGLE-3 drafter that learns to read futures, and what makes the target tell them."""

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from vllm_crossspec.cli.options import grouped
from vllm_crossspec.cli.train_options import (
    Bfloat16,
    DrafterRun,
    Lessons,
    Machine,
    Out,
    Rate,
    Rows,
    Steps,
    Teacher,
    check_start,
)


class ConfuRecipe(NamedTuple):
    """Options that are fields of the config."""

    num_soft_prompts: Annotated[
        int, typer.Option("--soft-prompts", min=1, help="Learned keys and values in each layer of the target (s).")
    ] = 16
    num_experts: Annotated[
        int, typer.Option("--experts", min=1, help="Embeddings of each of the two mixtures; 1 is the ablation without.")
    ] = 8
    top_experts: Annotated[
        int, typer.Option(min=1, help="So many of them are mixed; with 1 the gates learn nothing.")
    ] = 2
    num_steps: Annotated[int, typer.Option(min=1, help="Drafted tokens that training unrolls (L).")] = 7
    anchors_per_row: Annotated[
        int, typer.Option("--anchors", min=1, help="Contemplate tokens of one response in one step (K_train).")
    ] = 24
    replicas: Annotated[
        int, typer.Option(min=0, help="Places behind an anchor that share its future (l); 0 is the ablation without.")
    ] = 1
    max_lag: Annotated[
        int, typer.Option(min=0, help="Deepest draft node that contemplates: a round's gate lies so far behind it.")
    ] = 7
    no_future: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of drafts without a future, as a request's first one is.")
    ] = 0.1
    future_loss: Annotated[
        float, typer.Option(min=0.0, help="Weight of the futures' own loss: they foretell a token; 0 is the paper's.")
    ] = 0.3
    new_rate: Annotated[
        float, typer.Option(min=0.01, help="Learning rate of what EAGLE-3 does not have, as a multiple of --lr.")
    ] = 2.0
    teacher_temperature: Teacher = 1.0
    rows_per_step: Rows = 16
    bfloat16: Bfloat16 = True


@grouped
def train_confu_command(
    *,
    lessons: Lessons,
    start: Annotated[
        Path, typer.Option(help="Folder of the EAGLE-3 drafter to go on from; its shape and vocabulary stay.")
    ],
    out: Out,
    steps: Steps = 1500,
    lr: Rate = 2e-3,
    recipe: ConfuRecipe,
    machine: Machine,
) -> None:
    """Train a ConFu drafter from an EAGLE-3 drafter (`--start`).

    The target stays as it is. What is learned: soft prompts and contemplate tokens, which make it predict where a text
    goes, and a drafter that reads this future. To see what futures are worth, compare with an EAGLE-3 drafter that
    trained for as long: `crossspec train eagle3 --start`, with the same `--steps`. The drafter works with this target
    alone. Prints and stores (`acceptance.json`) the tokens a round on the held-out responses.
    """
    check_start(start)
    top, experts = recipe.top_experts, recipe.num_experts
    if top > experts:
        raise ValueError(f"--top-experts {top} must be at most --experts {experts}, of which they are chosen")
    run = DrafterRun(lessons, out, steps, lr, machine)
    run.begin()
    from vllm_crossspec.training.confu import ConfuConfig, train_confu

    run.train(train_confu, ConfuConfig(start=str(start.resolve()), **recipe._asdict()))
