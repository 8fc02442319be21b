"""How drafters and routers are trained: configs whose fields are the options of `crossspec train`.

An option's help says what the field is; fields without an option are for callers and tests. Nothing heavy is imported
here, so that ``--help`` is quick.
"""

import math
from collections import namedtuple
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal, get_args, get_type_hints

from typer import Option
from typer.models import OptionInfo

from crossspec_tools.train import cli_options as shared

RecipeName = Annotated[
    str, Option("--recipe", help="`pocket`, as the shipped drafter's, or `paper`: defaults of other options.")
]


def unless_given(default: Any, in_command: Any = None) -> Any:
    """A field with another default in the command; None: what ``--start`` or ``--recipe`` says, or else the field's."""
    return field(default=default, metadata={"in_command": in_command})


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """What a run of the loop is; two runs with equal configs and data give equal losses."""

    steps: int  # optimizer steps in all
    # the caller turns them into `steps`; 0 leaves these
    epochs: Annotated[int, Option(min=1, help="Passes over the responses, in the place of --steps.")] = unless_given(0)
    lr: float = 2e-3  # peak learning rate, shared by Muon (RMS-matched) and AdamW
    optimizer: Annotated[
        Literal["muon", "adamw"], Option(help="muon: for matrices, AdamW for the rest (default). adamw: for all.")
    ] = unless_given("muon")
    # of AdamW, whose first beta is 0.9
    beta2: Annotated[float, Option(min=0.0, max=0.9999, help="AdamW's second beta; 0.95 by default.")] = unless_given(
        0.95
    )
    warmup: int = 50  # steps of linear warm-up
    # `linear` falls to a twentieth over the last part of the run, `cosine` from the warm-up on to 0
    schedule: Annotated[
        Literal["linear", "cosine"],
        Option(help="After the warm-up. linear: flat, then falling over the last 40 % (the default). cosine: to 0."),
    ] = unless_given("linear")
    cooldown: float = 0.4  # that last part, a share of the run
    weight_decay: Annotated[float, Option(min=0.0, help="Of matrices; 0.05 by default.")] = unless_given(0.05)
    clip: Annotated[float, Option(min=0.001, help="Most that a gradient's norm may be; 1 by default.")] = unless_given(
        1.0
    )
    seed: int = 0  # of weights, data order and every other draw
    save_every: int = 100  # steps between resumable checkpoints
    eval_every: int = 200  # steps between evaluations

    def rate(self, step: int) -> float:
        """The factor on ``lr`` at ``step`` (counted from 0)."""
        rise = min(1.0, (step + 1) / max(1, self.warmup))
        if self.schedule == "cosine":
            fallen = max(0, step - self.warmup) / max(1, self.steps - self.warmup)
            return rise * 0.5 * (1.0 + math.cos(math.pi * fallen))
        left = (self.steps - step) / max(1.0, self.cooldown * self.steps)
        return rise * max(0.05, min(1.0, left))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What every drafter's training is told. What no config says (hidden size, heads, rotary base) is the target's."""

    teacher_temperature: Annotated[
        float,
        Option(
            min=0.01,
            help="Temperature of the target's distribution to imitate: 1 is its own, 0.1 nearly its first choice "
            "alone.",
        ),
    ] = 1.0
    rows_per_step: Annotated[int, Option(min=1, help="Responses of one optimizer step.")] = 16
    bfloat16: Annotated[bool, Option("--bfloat16/--float32", help="Of the computation; the weights are float32.")] = (
        True
    )
    eval_rows: int = 96  # held-out responses of an evaluation, at most
    states: Annotated[
        bool,
        Option(help="Read the target's states where `train generate --states` stored them, or run it in every step."),
    ] = True


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(Recipe):
    """Train an EAGLE-3 drafter (one layer, SafeAILab's format) by training-time test; the defaults are the pocket one.

    Prints and stores (`acceptance.json`) the tokens a round on the held-out responses.
    """

    start: Annotated[
        str, Option(metavar="<path>", help="Folder of a trained EAGLE-3 drafter to go on from, instead of anew.")
    ] = unless_given("")
    draft_vocab_size: Annotated[
        int, Option("--draft-vocab", min=1, help="The most frequent response tokens that it knows; 3072, or --start's.")
    ] = unless_given(3072)
    intermediate_size: Annotated[int, Option(min=1, help="Width of its MLP; 768, or --start's.")] = unless_given(768)
    num_steps: Annotated[int, Option(min=1, help="Drafted tokens that training unrolls.")] = 7
    step_decay: float = 0.8  # step s weighs step_decay ** s
    anchors_per_row: Annotated[int, Option("--anchors", min=1, help="Drafts of one response in one step.")] = 48


@dataclass(frozen=True, kw_only=True)
class ConfuConfig(Eagle3Config):
    """Train a ConFu drafter from an EAGLE-3 drafter (`--start`).

    The target stays as it is. What is learned: soft prompts and contemplate tokens, which make it predict where a text
    goes, and a drafter that reads this future. To see what futures are worth, compare with an EAGLE-3 drafter that
    trained for as long: `crossspec train eagle3 --start`, with the same `--steps`. The drafter works with this target
    alone. Prints and stores (`acceptance.json`) the tokens a round on the held-out responses.

    `--recipe paper` leaves out what is ours. It stands for `--no-future-skip --unaimed --future-loss 0 --new-rate 1
    --anchors-choose --step-decay 1`. Options that are given beside it count more.
    """

    start: Annotated[
        str,
        Option(metavar="<path>", help="Folder of the EAGLE-3 drafter to go on from; its shape and vocabulary stay."),
    ] = field(default="", metadata={"is_required": True})
    draft_vocab_size: int = 3072
    intermediate_size: int = 768
    states: bool = False  # contemplate tokens need the target's keys and values: it runs in every step
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
        float, Option(min=0.0, help="Weight of the futures' own loss: they foretell a token; 0.3, or 0.")
    ] = unless_given(0.3)
    future_skip: Annotated[bool, Option(help="Drafts start from states to which a projection of f is added.")] = (
        unless_given(True)
    )
    aimed: Annotated[
        bool,
        Option("--aimed/--unaimed", help="The future's experts begin where the drafter looks, or like any token's."),
    ] = unless_given(True)
    new_rate: Annotated[
        float, Option(min=0.01, help="Learning rate of what EAGLE-3 does not have, as a multiple of --lr; 2, or 1.")
    ] = unless_given(2.0)
    replicas_choose: Annotated[
        bool,
        Option(
            "--replicas-choose/--anchors-choose",
            help="Whose state chooses the embedding of a future that is shared: the replica's, or its anchor's.",
        ),
    ] = unless_given(True)
    step_decay: Annotated[
        float, Option(min=0.01, max=1.0, help="Drafted token i weighs step-decay^i in the loss; 0.8, or 1.")
    ] = unless_given(0.8)


CONFU_PAPER = {
    "future_loss": 0.0,
    "future_skip": False,
    "aimed": False,
    "new_rate": 1.0,
    "replicas_choose": False,
    "step_decay": 1.0,
}
"""What ``--recipe paper`` sets (Qin et al. 2026, section 3.3)."""


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(Recipe):
    """Train a DFlash drafter (block diffusion, z-lab's format); the defaults are the pocket one.

    Prints and stores (`acceptance.json`) the tokens a round on the held-out responses.
    """

    start: Annotated[
        str, Option(metavar="<path>", help="Folder of a trained DFlash drafter to go on from, instead of anew.")
    ] = unless_given("")
    num_layers: Annotated[
        int, Option("--layers", min=1, help="Layers of the drafter; 2, or --start's, and at least so many.")
    ] = unless_given(2)
    intermediate_size: Annotated[int, Option(min=1, help="Width of its MLPs; 1024, or --start's.")] = unless_given(1024)
    block_size: Annotated[
        int, Option(min=2, help="The last token and block-size - 1 drafts; 8, or --start's, or any other.")
    ] = unless_given(8)
    num_target_layers: Annotated[
        int, Option("--target-layers", min=1, help="Layers of the target that it reads; 5, or --start's.")
    ] = unless_given(5)
    mask_token: Annotated[
        str, Option(metavar="<token>", help="Stands where a draft is not known yet: a token that no text has.")
    ] = "<|mask|>"
    decay: Annotated[float, Option(min=0.1, help="Draft i weighs exp(-(i - 1) / decay) in the loss.")] = 4.0
    anchors_per_row: Annotated[int, Option("--anchors", min=1, help="Blocks of one response in one step.")] = 24

    kind: ClassVar[str] = "dflash"


@dataclass(frozen=True, kw_only=True)
class JetSpecConfig(DFlashConfig):
    """Train a JetSpec drafter (DFlash with causal blocks, hao-ai-lab's format); the defaults are the pocket DFlash's.

    `--start` takes a DFlash drafter, too, whose blocks become causal.

    Prints and stores (`acceptance.json`) the tokens a round on the held-out responses, of its first choices alone.
    """

    kind: ClassVar[str] = "jetspec"


@dataclass(frozen=True, kw_only=True)
class DartConfig(Recipe):
    """Train a DART drafter (parallel logits, fvliang's format) by annealed KL; the defaults are the pocket one.

    `--recipe paper` trains as the paper does: three epochs of AdamW (0.9, 0.999) at 2e-5 along a cosine, gradients
    clipped at 0.5. Drafts begin at every place of a response, and the output layer begins at random. Options that are
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
    anchors_per_row: Annotated[
        int, Option("--anchors", min=0, help="Drafts of one response in one step; 32, or 0: at every place.")
    ] = unless_given(32)
    head: Annotated[
        Literal["target", "random"], Option(help="What the output layer begins as; `target`, or `random`.")
    ] = unless_given("target")


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


@dataclass(frozen=True, kw_only=True)
class DraftModelConfig(Recipe):
    """Distil a small model that drafts by itself (methods `draft_model`, `flashhead`); the defaults are the pocket one.

    It begins as a few layers of the target, which must be a Llama or Qwen3 model, and learns the target's distributions
    over its responses. Prints and stores (`acceptance.json`) the tokens a round on the held-out responses.
    """

    num_layers: Annotated[
        int, Option("--layers", min=1, help="Decoder layers; they begin as layers of the target.")
    ] = 2
    intermediate_size: Annotated[int, Option(min=1, help="Width of its MLPs.")] = 576
    trains_embedding: Annotated[
        bool,
        Option("--own-embedding/--target-embedding", help="Train embedding and output layer, or keep the target's."),
    ] = True
    num_drafts: int = 7  # tokens of a draft with which the held-out acceptance is measured


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """What is generated; two runs with equal configs, data and target write equal shards, of so many prompts each."""

    max_prompt_tokens: Annotated[int, Option(min=1, help="Longer prompts are left out.")] = 384
    max_new_tokens: Annotated[int, Option(min=2, help="A response is cut there.")] = 192
    sampled_share: Annotated[
        float, Option(min=0.0, max=1.0, help="Share of the training prompts answered by sampling.")
    ] = 0.2
    temperature: Annotated[float, Option(min=0.01, help="Of the sampled responses.")] = 0.7
    dtype: Annotated[
        str, Option(help="Of the target, as it will be served. auto: its checkpoint's on a GPU, float32 on a CPU.")
    ] = unless_given("float32", in_command="auto")
    rows_per_batch: Annotated[int, Option("--batch", min=1, help="Prompts decoded together.")] = 64
    shard_rows: int = 512
    max_rows: Annotated[int, Option(min=0, help="At most so many training prompts; 0 takes all.")] = 0
    states: Annotated[bool, Option(help="Store the target's hidden states, too, which trainings then only read.")] = (
        False
    )
    state_layers: Annotated[
        str,
        Option(metavar="<i,j,...>", help="Store those after so many layers; those that drafters read by default."),
    ] = ""
    seed: shared.Seed = 0


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How a router is trained; the paper's values. Two runs with equal configs and records give equal routers."""

    lr: Annotated[float, Option(min=0.0, help="Peak learning rate of AdamW; falls along a cosine.")] = 1e-3
    epochs: Annotated[int, Option(min=1, help="Passes over the records; few records need more.")] = 1
    batch_tokens: Annotated[int, Option(min=1, help="Records of one optimizer step.")] = 8192
    dropout: Annotated[float, Option(min=0.0, max=0.9, help="In the middle layer.")] = 0.1
    weight_decay: Annotated[float, Option(min=0.0, help="Of AdamW.")] = 0.01
    held_out: Annotated[
        float, Option(min=0.0, max=0.9, help="Share of the texts kept for the report (and for --patience).")
    ] = 0.1
    patience: Annotated[
        int, Option(min=0, help="End after so many epochs without a better held-out error; 0: never.")
    ] = 0
    weighting: Annotated[
        str, Option(help="uniform: every token alike, as the paper. visits: by how likely a round begins there.")
    ] = "uniform"
    seed: shared.Seed = 0


def options_of(config: type, has_papers: bool = False) -> Any:
    """A NamedTuple of a config's options, as :func:`vllm_crossspec.cli.options.grouped` takes it.

    Options are None where ``--start`` or ``--recipe`` says the default. The class's own come before those that it
    inherits; with ``has_papers`` ``--recipe`` is one of them.
    """
    known, hints = {x.name: x for x in fields(config)}, get_type_hints(config, include_extras=True)
    kinds: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for name in dict.fromkeys(name for kind in config.__mro__ for name in vars(kind).get("__annotations__", ())):
        of, *marks = get_args(hints[name]) or (None,)
        if not any(isinstance(mark, OptionInfo) for mark in marks):
            continue
        kinds[name], how = hints[name], known[name].metadata
        if "is_required" not in how:
            defaults[name] = how.get("in_command", known[name].default)
            if defaults[name] is None:
                kinds[name] = Annotated[of | None, marks[0]]
    if has_papers:
        kinds["recipe_name"], defaults["recipe_name"] = RecipeName, "pocket"
    found = namedtuple("Options", kinds, defaults=list(defaults.values()))  # type: ignore[misc]
    found.__annotations__ = kinds
    return found
