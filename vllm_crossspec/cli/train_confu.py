"""`crossspec train confu`: an EAGLE-3 drafter that learns to read futures, and what makes the target tell them."""

from pathlib import Path
from typing import Annotated, NamedTuple

from typer import Option

from vllm_crossspec.cli import train_options as shared
from vllm_crossspec.cli.options import grouped


class ConfuRecipe(NamedTuple):
    """Options that are fields of the config."""

    num_soft_prompts: Annotated[
        int, Option("--soft-prompts", min=1, help="Learned keys and values in each layer of the target (s).")
    ] = 16
    num_experts: Annotated[
        int, Option("--experts", min=1, help="Embeddings of each of the two mixtures; 1 is the ablation without.")
    ] = 8
    top_experts: Annotated[int, Option(min=1, help="So many of them are mixed; with 1 the gates learn nothing.")] = 2
    num_steps: Annotated[int, Option(min=1, help="Drafted tokens that training unrolls (L).")] = 7
    anchors_per_row: Annotated[
        int, Option("--anchors", min=1, help="Contemplate tokens of one response in one step (K_train).")
    ] = 24
    replicas: Annotated[
        int, Option(min=0, help="Places behind an anchor that share its future (l); 0 is the ablation without.")
    ] = 1
    max_lag: Annotated[
        int, Option(min=0, help="Deepest draft node that contemplates: a round's gate lies so far behind it.")
    ] = 7
    no_future: Annotated[
        float, Option(min=0.0, max=1.0, help="Share of drafts without a future, as a request's first one is.")
    ] = 0.1
    future_loss: Annotated[
        float, Option(min=0.0, help="Weight of the futures' own loss: they foretell a token; 0 is the paper's.")
    ] = 0.3
    new_rate: Annotated[
        float, Option(min=0.01, help="Learning rate of what EAGLE-3 does not have, as a multiple of --lr.")
    ] = 2.0
    teacher_temperature: shared.Teacher = 1.0
    rows_per_step: shared.Rows = 16
    bfloat16: shared.Bfloat16 = True


@grouped
def train_confu_command(
    *,
    lessons: shared.Lessons,
    start: Annotated[Path, Option(help="Folder of the EAGLE-3 drafter to go on from; its shape and vocabulary stay.")],
    out: shared.Out,
    steps: shared.Steps = 1500,
    lr: shared.Rate = 2e-3,
    recipe: ConfuRecipe,
    machine: shared.Machine,
) -> None:
    """Train a ConFu drafter from an EAGLE-3 drafter (`--start`).

    The target stays as it is. What is learned: soft prompts and contemplate tokens, which make it predict where a text
    goes, and a drafter that reads this future. To see what futures are worth, compare with an EAGLE-3 drafter that
    trained for as long: `crossspec train eagle3 --start`, with the same `--steps`. The drafter works with this target
    alone. Prints and stores (`acceptance.json`) the tokens a round on the held-out responses.
    """
    shared.check_start(start)
    top, experts = recipe.top_experts, recipe.num_experts
    if top > experts:
        raise ValueError(f"--top-experts {top} must be at most --experts {experts}, of which they are chosen")
    run = shared.DrafterRun(lessons, out, steps, lr, machine)
    run.begin()
    from vllm_crossspec.training.confu import ConfuConfig, train_confu

    run.train(train_confu, ConfuConfig(start=str(start.resolve()), **recipe._asdict()))
