"""The commands of `crossspec train` that make drafters; a kind's entry names its own (``DrafterKind.trainer``)."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from typer import Option

from vllm_crossspec.cli import train_options as shared
from vllm_crossspec.cli.options import grouped
from vllm_crossspec.names import look_up


class Trainer(NamedTuple):
    """How drafters of one kind are trained.

    Attributes:
        recipe: a NamedTuple of options; its docstring is the command's help.
        module: with the two that follow.
        config: name of the class of its settings.
        train: name of the function that trains.
        steps, lr: defaults of the options that all have.
        settings: the config's fields, of the recipe. Raises ValueError where they do not go together.
        made: what it makes, in a word.
        paper_loop: settings of the loop that ``--recipe paper`` stands for, where the recipe has that option.
    """

    recipe: Any
    module: str
    config: str
    train: str
    steps: int
    lr: float
    settings: Callable[[Any], dict[str, Any]] = lambda recipe: dict(recipe._asdict())
    made: str = "drafter"
    paper_loop: dict[str, Any] = {}  # noqa: RUF012 (read alone)

    def command(self) -> Callable[..., None]:
        """The command, as typer takes it."""

        def command(
            *,
            lessons: shared.Lessons,
            out: shared.Out,
            steps: Annotated[int | None, Option(min=1, show_default=f"{self.steps}", help=shared.STEPS)] = None,
            lr: Annotated[float | None, Option(min=0.0, show_default=f"{self.lr:g}", help=shared.RATE)] = None,
            loop: shared.Loop,
            recipe: Any,
            machine: shared.Machine,
        ) -> None:
            settings = self.settings(recipe)
            run = self._run(steps, lr, loop, getattr(recipe, "recipe_name", "") == "paper")
            shared.check_folder("--data", lessons.data, "make it with `crossspec train generate`")
            shared.check_model_folder(lessons.target)
            shared.begin(out, machine.threads, machine.resume)
            from vllm_crossspec.training.loop import LoopConfig

            module, config = import_module(self.module), LoopConfig(**run, seed=machine.seed)
            getattr(module, self.train)(*lessons, out, getattr(module, self.config)(**settings), config, machine.device)
            sys.stdout.write(f"{self.made} in {out / 'model'}\n")

        command.__doc__, command.__annotations__["recipe"] = self.recipe.__doc__, self.recipe
        return grouped(command)

    def _run(self, steps: int | None, lr: float | None, loop: shared.Loop, is_papers: bool) -> dict[str, Any]:
        """Settings of the loop: the recipe's, and what was given in their place."""
        if steps is not None and loop.epochs is not None:
            raise ValueError(f"--steps {steps} and --epochs {loop.epochs} both say how long to train: give one of them")
        run = {"steps": self.steps, "lr": self.lr} | (self.paper_loop if is_papers else {})
        if steps is not None:
            run |= {"steps": steps, "epochs": 0}
        return run | ({} if lr is None else {"lr": lr}) | _given(loop)


EAGLE3_START = "an EAGLE-3 drafter that `crossspec train eagle3` made"
DFLASH_START = "a DFlash drafter that `crossspec train dflash` made"


class Eagle3Recipe(NamedTuple):
    """Train an EAGLE-3 drafter (one layer, SafeAILab's format) by training-time test; the defaults are the pocket one.

    Prints and stores (`acceptance.json`) the tokens a round on the held-out responses.
    """

    start: Annotated[
        Path | None, Option(help="Folder of a trained EAGLE-3 drafter to go on from, instead of anew.")
    ] = None
    draft_vocab_size: Annotated[
        int | None,
        Option("--draft-vocab", min=1, help="The most frequent response tokens that it knows; 3072, or --start's."),
    ] = None
    intermediate_size: Annotated[int | None, Option(min=1, help="Width of its MLP; 768, or --start's.")] = None
    num_steps: Annotated[int, Option(min=1, help="Drafted tokens that training unrolls.")] = 7
    teacher_temperature: shared.Teacher = 1.0
    rows_per_step: shared.Rows = 16
    anchors_per_row: Annotated[int, Option("--anchors", min=1, help="Drafts of one response in one step.")] = 48
    bfloat16: shared.Bfloat16 = True


def _given(recipe: Any) -> dict[str, Any]:
    """The options that were given; what an option is otherwise, the config or ``--start`` says."""
    return {name: value for name, value in recipe._asdict().items() if value is not None}


def _given_beside(recipe: Any, papers: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given, and what ``--recipe`` sets of the others. Raises ValueError for an unknown one."""
    given = _given(recipe)
    recipes: dict[str, Mapping[str, Any]] = {"pocket": {}, "paper": papers}
    return {**look_up(given.pop("recipe_name"), recipes, "--recipe", "recipe"), **given}


def _eagle3_settings(recipe: Eagle3Recipe) -> dict[str, Any]:
    if recipe.start is None:
        return _given(recipe)
    shared.check_start(recipe.start, EAGLE3_START)
    kept = {"--draft-vocab": recipe.draft_vocab_size, "--intermediate-size": recipe.intermediate_size}
    for option, value in kept.items():
        if value is not None:
            raise ValueError(f"{option} {value}: a drafter that goes on from --start keeps its own; leave it out")
    return {**_given(recipe), "start": str(recipe.start.resolve())}


EAGLE3 = Trainer(
    Eagle3Recipe, "vllm_crossspec.training.eagle3", "Eagle3Config", "train_eagle3", 3000, 2e-3, _eagle3_settings
)


class ConfuRecipe(NamedTuple):
    """Train a ConFu drafter from an EAGLE-3 drafter (`--start`).

    The target stays as it is. What is learned: soft prompts and contemplate tokens, which make it predict where a text
    goes, and a drafter that reads this future. To see what futures are worth, compare with an EAGLE-3 drafter that
    trained for as long: `crossspec train eagle3 --start`, with the same `--steps`. The drafter works with this target
    alone. Prints and stores (`acceptance.json`) the tokens a round on the held-out responses.

    `--recipe paper` leaves out what is ours: it stands for `--no-future-skip --unaimed --future-loss 0 --new-rate 1
    --anchors-choose --step-decay 1`, each of which may also be given alone, or otherwise beside it.
    """

    start: Annotated[Path, Option(help="Folder of the EAGLE-3 drafter to go on from; its shape and vocabulary stay.")]
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
    recipe_name: Annotated[
        str,
        Option(
            "--recipe", help="`pocket`, as the shipped drafter's, or `paper`: the defaults of the options that follow."
        ),
    ] = "pocket"
    future_loss: Annotated[
        float | None, Option(min=0.0, help="Weight of the futures' own loss: they foretell a token; 0.3, or 0.")
    ] = None
    future_skip: Annotated[
        bool | None,
        Option("--future-skip/--no-future-skip", help="Drafts start from states to which a projection of f is added."),
    ] = None
    aimed: Annotated[
        bool | None,
        Option("--aimed/--unaimed", help="The future's experts begin where the drafter looks, or like any token's."),
    ] = None
    new_rate: Annotated[
        float | None,
        Option(min=0.01, help="Learning rate of what EAGLE-3 does not have, as a multiple of --lr; 2, or 1."),
    ] = None
    replicas_choose: Annotated[
        bool | None,
        Option(
            "--replicas-choose/--anchors-choose",
            help="Whose state chooses the embedding of a future that is shared: the replica's, or its anchor's.",
        ),
    ] = None
    step_decay: Annotated[
        float | None, Option(min=0.01, max=1.0, help="Drafted token i weighs step-decay^i in the loss; 0.8, or 1.")
    ] = None
    teacher_temperature: shared.Teacher = 1.0
    rows_per_step: shared.Rows = 16
    bfloat16: shared.Bfloat16 = True


CONFU_PAPER = {
    "future_loss": 0.0,
    "future_skip": False,
    "aimed": False,
    "new_rate": 1.0,
    "replicas_choose": False,
    "step_decay": 1.0,
}
"""What ``--recipe paper`` sets (Qin et al. 2026, section 3.3)."""


def _confu_settings(recipe: ConfuRecipe) -> dict[str, Any]:
    shared.check_start(recipe.start, EAGLE3_START)
    top, experts = recipe.top_experts, recipe.num_experts
    if top > experts:
        raise ValueError(f"--top-experts {top} must be at most --experts {experts}, of which they are chosen")
    return {**_given_beside(recipe, CONFU_PAPER), "start": str(recipe.start.resolve())}


CONFU = Trainer(ConfuRecipe, "vllm_crossspec.training.confu", "ConfuConfig", "train_confu", 1500, 2e-3, _confu_settings)


class DFlashRecipe(NamedTuple):
    """Train a DFlash drafter (block diffusion, z-lab's format); the defaults are the pocket one.

    Prints and stores (`acceptance.json`) the tokens a round on the held-out responses.
    """

    start: Annotated[Path | None, Option(help="Folder of a trained DFlash drafter to go on from, instead of anew.")] = (
        None
    )
    num_layers: Annotated[
        int | None, Option("--layers", min=1, help="Layers of the drafter; 2, or --start's, and at least so many.")
    ] = None
    intermediate_size: Annotated[int | None, Option(min=1, help="Width of its MLPs; 1024, or --start's.")] = None
    block_size: Annotated[
        int | None, Option(min=2, help="The last token and block-size - 1 drafts; 8, or --start's, or any other.")
    ] = None
    num_target_layers: Annotated[
        int | None, Option("--target-layers", min=1, help="Layers of the target that it reads; 5, or --start's.")
    ] = None
    decay: Annotated[float, Option(min=0.1, help="Draft i weighs exp(-(i - 1) / decay) in the loss.")] = 4.0
    teacher_temperature: shared.Teacher = 1.0
    rows_per_step: shared.Rows = 16
    anchors_per_row: Annotated[int, Option("--anchors", min=1, help="Blocks of one response in one step.")] = 24
    bfloat16: shared.Bfloat16 = True


def _dflash_settings(recipe: DFlashRecipe) -> dict[str, Any]:
    if recipe.start is None:
        return _given(recipe)
    found = shared.check_start(recipe.start, DFLASH_START)
    taps = (found.get("dflash_config") or {}).get("target_layer_ids") or ()
    own = {"num_layers": found.get("num_hidden_layers"), "num_target_layers": len(taps)}
    own |= {name: found.get(name) for name in ("intermediate_size", "block_size")}
    started = {name: value for name, value in own.items() if value}
    return {**started, **_given(recipe), "start": str(recipe.start.resolve())}


DFLASH = Trainer(
    DFlashRecipe, "vllm_crossspec.training.dflash", "DFlashConfig", "train_dflash", 3000, 2e-3, _dflash_settings
)


class DartRecipe(NamedTuple):
    """Train a DART drafter (parallel logits, fvliang's format) by annealed KL; the defaults are the pocket one.

    `--recipe paper` trains as the paper does: AdamW (0.9, 0.999) at 2e-5 along a cosine, gradients clipped at 0.5, for
    three epochs, with drafts at every place of a response and an output layer that begins at random. Options that are
    given beside it count more.

    Prints and stores (`acceptance.json`) the tokens a round on the held-out responses, of its first choices alone:
    the n-gram store that joins them into trees is made with `crossspec ngram build`. An `--unshifted` drafter is for
    comparing; no engine decodes with it.
    """

    draft_vocab_size: Annotated[
        int, Option("--draft-vocab", min=1, help="The most frequent response tokens that it knows.")
    ] = 3072
    intermediate_size: Annotated[int, Option(min=1, help="Width of its MLP.")] = 1024
    num_drafts: Annotated[int, Option(min=2, help="Tokens of a draft: an entry and num-drafts - 1 masks.")] = 8
    gamma: Annotated[
        float, Option(min=0.01, max=1.0, help="Draft i weighs gamma^(i - 1) in the loss; the paper's 0.6.")
    ] = 0.6
    is_shifted: Annotated[
        bool, Option("--shifted/--unshifted", help="Rows predict the token after their place (DART), or their own.")
    ] = True
    teacher_temperature: shared.Teacher = 1.0
    rows_per_step: shared.Rows = 16
    recipe_name: Annotated[
        str,
        Option("--recipe", help="`pocket`, as the shipped drafter's, or `paper`: defaults of other options."),
    ] = "pocket"
    anchors_per_row: Annotated[
        int | None, Option("--anchors", min=0, help="Drafts of one response in one step; 32, or 0: at every place.")
    ] = None
    head: Annotated[
        Literal["target", "random"] | None, Option(help="What the output layer begins as; `target`, or `random`.")
    ] = None
    bfloat16: shared.Bfloat16 = True


DART_PAPER = {"anchors_per_row": 0, "head": "random"}
DART_LOOP = {
    "epochs": 3,
    "lr": 2e-5,
    "optimizer": "adamw",
    "beta2": 0.999,
    "schedule": "cosine",
    "weight_decay": 0.0,
    "clip": 0.5,
}
"""Liu et al. 2026, section 3.3 and appendix B.2, which leave open weight decay and how the head begins."""


def _dart_settings(recipe: DartRecipe) -> dict[str, Any]:
    return _given_beside(recipe, DART_PAPER)


DART = Trainer(
    DartRecipe,
    "vllm_crossspec.training.dart",
    "DartConfig",
    "train_dart",
    2200,
    2e-3,
    _dart_settings,
    paper_loop=DART_LOOP,
)


class DraftModelRecipe(NamedTuple):
    """Distil a small model that drafts by itself (methods `draft_model`, `flashhead`); the defaults are the pocket one.

    It begins as a few layers of the target, which must be a Qwen3 model, and learns the target's distributions over
    its responses. Prints and stores (`acceptance.json`) the tokens a round on the held-out responses.
    """

    num_layers: Annotated[
        int, Option("--layers", min=1, help="Decoder layers; they begin as layers of the target.")
    ] = 2
    intermediate_size: Annotated[int, Option(min=1, help="Width of its MLPs.")] = 576
    teacher_temperature: shared.Teacher = 1.0
    rows_per_step: shared.Rows = 16
    bfloat16: shared.Bfloat16 = True


DRAFT_MODEL = Trainer(
    DraftModelRecipe,
    "vllm_crossspec.training.draft_model",
    "DraftModelConfig",
    "train_draft_model",
    4000,
    3e-3,
    made="draft model",
)
