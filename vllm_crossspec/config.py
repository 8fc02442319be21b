"""Our settings and their types: what ``--speculative-config`` may say, and what rides to the workers."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictFloat, StrictInt
from pydantic_core import PydanticCustomError

from vllm_crossspec.contemplate.layout import planned_tokens
from vllm_crossspec.drafters.base import drafter_kind

ADDITIONAL_CONFIG_KEY = "crossspec"
"""Where the resolved settings ride to the workers, inside vLLM's ``additional_config``."""

META_METHODS = ("whiflash",)

MAX_DRAFT_TOKENS = 255
"""Most draft tokens of a request in a round, of a chain as of a tree."""

MAX_DEPTH = 64
"""Deepest level of a tree that is expanded level by level."""


class Settings(BaseModel):
    """The base of all settings: frozen, and no key beside the known ones.

    Numbers and truth values are strict: JSON has them, so that `"5"` or `true` in a number's place is a mistake.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")


def _known_schedule(value: Any) -> Any:
    """Two sentences of pydantic's, one for each kind of schedule, become one of ours."""
    if value is None or value == "auto":
        return value
    if not isinstance(value, Mapping):
        raise PydanticCustomError("schedule", "should be 'auto' or draft tokens by running requests as in {\"1\": 60}")
    for requests, tokens in value.items():
        if not str(requests).isdecimal() or not _is_number(tokens, int):
            raise PydanticCustomError(
                "schedule",
                'should be whole draft tokens by running requests as in {"1": 60}; {pair} is not',
                {"pair": f'"{requests}": {json.dumps(tokens, default=repr)}'},
            )
    return value


def _known_threshold(value: Any) -> Any:
    """The same for thresholds."""
    if value != "auto" and not _are_numbers(value):
        raise PydanticCustomError("threshold", "should be 'auto', a number, or a list of numbers")
    return value


def _known_categories(value: Any) -> Any:
    """And for thresholds by category; each becomes a list of numbers."""
    if not isinstance(value, Mapping) or not all(name and _are_numbers(given) for name, given in value.items()):
        raise PydanticCustomError(
            "categories", 'should be a number, or a list of them, for each category, as in {"math": 0.5}'
        )
    return {name: given if isinstance(given, list | tuple) else (given,) for name, given in value.items()}


def _are_numbers(value: Any) -> bool:
    return all(_is_number(number, int | float) for number in (value if isinstance(value, list | tuple) else (value,)))


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


Schedule = Annotated[Literal["auto"] | dict[int, int], BeforeValidator(_known_schedule)]
Threshold = Annotated[Literal["auto"] | float | tuple[float, ...], BeforeValidator(_known_threshold)]
ThresholdsByCategory = Annotated[dict[str, tuple[float, ...]], BeforeValidator(_known_categories)]


class TreeConfig(Settings):
    """How a drafter's candidates become a draft.

    Attributes:
        type: ``chain`` is the drafter's first choice at every position; ``dynamic`` expands the best nodes depth by
            depth and keeps the best of all (EAGLE-2, section 4; autoregressive drafters); ``best_first`` keeps the
            most probable prefixes under the product of marginals (parallel drafters); ``continuity`` searches them
            with a beam, by n-grams too (DART, algorithm 1 and appendix D; parallel drafters); ``matches`` keeps the
            most frequent prefixes of what was found (SuffixDecoding, section 3.2; drafters without weights). Left out,
            it is the drafter's own kind of tree where one of the sizes is given, else a chain; some kinds always draft
            trees.
        depth: deepest level of a ``dynamic`` tree, tokens.
        top_k: children of a node and width of a level; for the others, candidates at a position.
        num_nodes: draft tokens that the target verifies at once.
        beam_width: prefixes of a level that ``continuity`` goes on from.
        ngram_weight: of ln p by the n-gram store (``ngram``), beside 1 for the drafter's.
        logit_decay, level_decay: of ``continuity``: at level i, from 0, the drafter's ln p weighs ``logit_decay ** i``,
            and the level's sum ``(i + 1) ** -level_decay``.
        sharpness: for greedy requests, what the drafter's logits are multiplied by before nodes are ranked. The target
            takes its likeliest token, and the drafter's is that one more often than its probability says. Drafts that
            are not coupled (``draft_sample_method`` "greedy") do not know a request's temperature, and are left alone.
        by_batch_size: most draft tokens of a request by the number of running requests, as ``{"1": 60, "8": 30,
            "32": 3, "64": 0}``: from 8 requests on 30, from 64 on none. "auto" chooses from what steps cost, measured
            at start-up; a tree for which nothing is given means it, and where it cannot be measured (with data
            parallelism, in Triton's interpreter) has no schedule. ``{"1": 60}`` keeps the whole tree at every load.
    """

    type: Literal["chain", "dynamic", "best_first", "continuity", "matches"] = "chain"
    depth: StrictInt | None = Field(None, ge=1, le=MAX_DEPTH)
    top_k: StrictInt | None = Field(None, ge=1, le=255)
    num_nodes: StrictInt | None = Field(None, ge=1, le=MAX_DRAFT_TOKENS)
    beam_width: StrictInt | None = Field(None, ge=1, le=255)
    ngram_weight: StrictFloat | None = Field(None, ge=0, le=10)
    logit_decay: StrictFloat | None = Field(None, gt=0, le=1)
    level_decay: StrictFloat | None = Field(None, ge=0, le=10)
    sharpness: StrictFloat | None = Field(None, gt=0, le=10)
    by_batch_size: Schedule | None = None

    @property
    def is_chain(self) -> bool:
        """Whether every node has one child."""
        return self.type == "chain"


class NgramConfig(Settings):
    """The n-gram store by which trees of a parallel drafter are pruned; a path alone stands for ``model``.

    Attributes:
        model: file that ``crossspec ngram build`` or ``import`` wrote.
        placement: ``gpu`` copies the store onto the drafter's device; ``host`` leaves it in host memory, which a GPU
            reads over the bus. On a CPU they are the same.
        budget_gib: most GiB of the device for the copy; a larger store stays on the host, with a warning.
        order: use n-grams of this length at most; None: the store's own.
        backoff: None for the longest match, as the paper's; a factor up to 1 for stupid backoff.
    """

    model: str = Field(min_length=1)
    placement: Literal["host", "gpu"] = "gpu"
    budget_gib: StrictFloat = Field(4.0, gt=0)
    order: StrictInt | None = Field(None, ge=2, le=5)
    backoff: StrictFloat | None = Field(None, gt=0, le=1)


class HeadConfig(Settings):
    """A drafter's output layer in the place of the dense one; a path alone stands for ``model``.

    Attributes:
        type: ``flashhead`` scores the tokens of a few clusters of the output embedding (``heads.flashhead``).
        model: folder that ``crossspec flashhead build`` wrote, or a published one; None: the drafter's own folder has
            the clusters, as published FlashHead models do.
        num_probes: clusters that are looked into; None: what the assets say.
        clusters: which are looked into for sampled requests: the ``nearest``, or as many ``drawn`` as the paper does.
        grouped: keep a second copy of the output embedding in the clusters' order, which is quicker to read.
        centroid_dtype: of the centroids; None: the embedding's.
    """

    type: Literal["flashhead"] = "flashhead"
    model: str | None = Field(None, min_length=1)
    num_probes: StrictInt | None = Field(None, ge=1)
    clusters: Literal["nearest", "drawn"] = "nearest"
    grouped: StrictBool = False
    centroid_dtype: Literal["float32", "bfloat16", "float16", "float8_e4m3fn"] | None = None


class LookupConfig(Settings):
    """What a drafter without weights looks for; left out, as its kind has it.

    Attributes:
        min_match: fewest of the last tokens that must have stood together before.
        max_match: most that are compared; the longest match counts.
        num_matches: places of a request's own text that a tree is made of, and as many of earlier outputs.
        share: whether requests draft from what others were answered. One user's text can then show in how long
            another's answer takes: for operators whose users trust each other. Of drafters that can.
        cache_tokens: most tokens of earlier outputs that are kept with ``share``, the newest.
    """

    min_match: StrictInt | None = Field(None, ge=1, le=64)
    max_match: StrictInt | None = Field(None, ge=1, le=64)
    num_matches: StrictInt | None = Field(None, ge=1, le=32)
    share: StrictBool = False
    cache_tokens: StrictInt = Field(1 << 20, ge=64, le=1 << 26)


class AdaptiveConfig(Settings):
    """How deep and wide the tree of one request is in one round; a path alone stands for ``model``.

    Attributes:
        type: ``heterospec`` reads both off the drafter's own entropy (``adaptive.heterospec``). ``record`` is what
            ``crossspec calibrate heterospec`` uses: all trees are the same, and what became of each is kept.
        model: file that ``crossspec calibrate heterospec`` wrote for this target, drafter and tree.
        max_extension: most levels that a tree may grow beyond its depth; None: as calibrated. 0 only prunes.
    """

    type: Literal["heterospec", "record"] = "heterospec"
    model: str | None = Field(None, min_length=1)
    max_extension: StrictInt | None = Field(None, ge=0, le=32)


def _path_alone(value: Any) -> Any:
    return {"model": value} if isinstance(value, str) else value


class RouterConfig(Settings):
    """Which drafter drafts for a request in a round.

    Attributes:
        policy: ``fixed`` is always ``drafter``, and no other is loaded; ``entropy`` and ``neural`` are WhiFlash's (Kwon
            et al. 2026, section 3.3); ``goodput`` takes the drafter with the most expected tokens per second, by what
            its drafts have been worth or, with ``model``, by a trained router's word. ``record`` is what
            ``crossspec collect`` uses: every drafter drafts, nothing is verified.
        drafter: of policy ``fixed``, a key of ``drafters``.
        model: folder of a trained router (``neural``, ``goodput``; for ``entropy`` it says what "auto" means).
        threshold: ``entropy``: nats above which the autoregressive drafter drafts; ``neural``: tokens by which it must
            be expected to do better. One number, or one for each drafter but the last in routing order. "auto" is set
            from the drafters' costs.
        by_category: thresholds of requests that name a category (``vllm_xargs``: ``crossspec_category``); all others
            go by ``threshold`` (WhiFlash calibrates one for each category, section 3.3.1).
        entropy_of: ``model``: the entropy is that of the target's logits as they come, whatever the temperature;
            ``sampling``: that of the distribution at the request's temperature, as in WhiFlash; greedy ones as before.
        costs: file of what rounds cost (``crossspec costs``), for "auto" thresholds and ``goodput``; None: measured
            at start-up.
        max_backlog: most tokens that a request's inactive drafter may miss before it catches up.
        explore: ``goodput`` without ``model``: whether every 64th round tries a drafter, by turns.
        correct: ``neural``, and ``goodput`` with ``model``: whether predictions are corrected by what a request's own
            rounds have brought; the paper's are not.
        lazy: whether inactive drafters wait; if not, all of them catch up in every round.
    """

    policy: Literal["fixed", "entropy", "neural", "goodput", "record"] = "goodput"
    drafter: str | None = None
    model: str | None = None
    threshold: Threshold = "auto"
    by_category: ThresholdsByCategory = {}
    entropy_of: Literal["model", "sampling"] = "model"
    costs: str | None = Field(None, min_length=1)
    max_backlog: StrictInt = Field(512, ge=1, le=1 << 20)
    explore: StrictBool = True
    correct: StrictBool = True
    lazy: StrictBool = True


class DrafterConfig(Settings):
    """One drafter.

    Attributes:
        kind: entry of the drafter registry (``drafters.base``).
        model: folder or hub id of its checkpoint; empty for one that has none.
        num_speculative_tokens: most tokens that it drafts in a round; None before it is resolved.
        tree: what its candidates become.
        ngram: the store that helps to build its trees; None for none.
        head: its output layer; None for the checkpoint's own.
        adaptive: what sizes its trees by request and round; None: all are the same.
        lookup: what a drafter without weights looks for; None for the others.
        of: another drafter whose weights and cache this one uses, to draft in another form; None: its own.
        dtype: what its matrix products are computed in, on a CPU; None: the target's own type.
        target_layers: target layers that it taps in vLLM's numbering; empty before they are resolved.
        native: keys that vLLM's own SpeculativeConfig understands, handed through.
    """

    kind: str
    model: str
    num_speculative_tokens: StrictInt | None = Field(None, ge=1, le=MAX_DRAFT_TOKENS)
    tree: TreeConfig = TreeConfig()
    ngram: Annotated[NgramConfig, BeforeValidator(_path_alone)] | None = None
    head: Annotated[HeadConfig, BeforeValidator(_path_alone)] | None = None
    adaptive: Annotated[AdaptiveConfig, BeforeValidator(_path_alone)] | None = None
    lookup: LookupConfig | None = None
    of: str | None = None
    dtype: Literal["bfloat16"] | None = None
    target_layers: tuple[int, ...] = ()
    native: dict[str, Any] = {}

    @property
    def max_depth(self) -> int:
        """Most tokens that it drafts one after another: its depth, and what adaptive trees may grow beyond."""
        extension = self.adaptive.max_extension if self.adaptive is not None else None
        return (self.num_speculative_tokens or 0) + (extension or 0)


class CrossSpecConfig(Settings):
    """The whole of our settings.

    Attributes:
        method: as the user wrote it.
        drafters: by name; the first is the one whose vLLM method carries the engine.
        router: None where there is one drafter.
        verification: ``match`` samples at every node with vLLM's own sampler and walks the tree while the drafts
            match; ``rejection`` is vLLM's rejection sampler, for chains.
        draft_sample_method: how drafters choose for sampled requests: ``coupled`` ranks with the noise that the
            target will use, ``greedy`` without, ``probabilistic`` samples (with ``rejection`` only). None: coupled
            under ``match``, vLLM's default under ``rejection``.
        num_speculative_tokens: most draft tokens of a request that are verified; None before it is resolved.
    """

    method: str
    drafters: dict[str, DrafterConfig]
    router: RouterConfig | None = None
    verification: Literal["match", "rejection"] = "match"
    draft_sample_method: Literal["coupled", "greedy", "probabilistic"] | None = None
    num_speculative_tokens: StrictInt | None = Field(None, ge=1, le=MAX_DRAFT_TOKENS)

    @property
    def active(self) -> str:
        """Name of the drafter that drafts."""
        return (self.router.drafter if self.router else None) or next(iter(self.drafters))

    def without_idle(self) -> "CrossSpecConfig":
        """Of these settings, as they were parsed, what can ever draft: by policy ``fixed`` one drafter, as if alone."""
        if self.router is None or self.router.policy != "fixed":
            return self
        alone = self.drafters[self.active].model_copy(update={"of": None})
        return self.model_copy(update={"drafters": {self.active: alone}})

    def path_of(self, name: str) -> str:
        """How the keys of a drafter begin, as the user wrote them."""
        return "speculative_config." + (f"drafters.{name}." if self.method in META_METHODS else "")

    @property
    def is_routed(self) -> bool:
        """Whether drafters are chosen by request and round; if not, one of them always drafts."""
        return len(self.drafters) > 1 and self.verification == "match"

    @property
    def routing_order(self) -> tuple[str, ...]:
        """Names of the drafters as routers number them: autoregressive ones first; the last is the reference."""
        return tuple(
            sorted(self.drafters, key=lambda name: not drafter_kind(self.drafters[name].kind, "").is_autoregressive)
        )

    def owner_of(self, name: str) -> str:
        """The drafter whose weights and cache a drafter uses: itself, or another (``of``)."""
        return self.drafters[name].of or name

    @property
    def owners(self) -> tuple[str, ...]:
        """Names of the drafters with weights and a cache of their own."""
        return tuple(name for name, drafter in self.drafters.items() if drafter.of is None)

    def width_of(self, name: str) -> int:
        """Most draft nodes of a request by this drafter."""
        drafter = self.drafters[name]
        if drafter_kind(drafter.kind, "").supplies == "none":
            return 0
        return drafter.tree.num_nodes or drafter.num_speculative_tokens or 0

    @property
    def routes_load(self) -> bool:
        """Whether the router itself drops drafts where they cost more than they bring."""
        router, kinds = self.router, (drafter_kind(drafter.kind, "") for drafter in self.drafters.values())
        by_experience = router is not None and router.policy == "goodput" and router.model is None
        return by_experience and any(kind.supplies == "none" for kind in kinds)

    @property
    def differs_in_width(self) -> bool:
        """Whether the requests of a batch may bring different numbers of draft rows."""
        return self.is_adaptive or (self.is_routed and len(set(map(self.width_of, self.drafters))) > 1)

    @property
    def has_trees(self) -> bool:
        """Whether any drafter drafts more than chains."""
        return any(not d.tree.is_chain for d in self.drafters.values())

    @property
    def contemplates(self) -> bool:
        """Whether the target runs a contemplate row for every row that it verifies."""
        return any(drafter_kind(d.kind, "").contemplates for d in self.drafters.values())

    @property
    def rows_per_node(self) -> int:
        """Rows of the target's step for every row that it verifies."""
        return 2 if self.contemplates else 1

    def planned(self, num_nodes: int) -> int:
        """Draft tokens of a request to vLLM's scheduler, contemplate rows included, for so many draft nodes."""
        return planned_tokens(num_nodes, self.contemplates)

    @property
    def is_adaptive(self) -> bool:
        """Whether any drafter's trees differ in size by request and round."""
        return any(d.adaptive is not None and d.adaptive.type != "record" for d in self.drafters.values())

    @property
    def measures_load(self) -> bool:
        """Whether draft tokens by running requests are chosen from what steps cost at start-up."""
        return any(d.tree.by_batch_size == "auto" for d in self.drafters.values())

    @property
    def max_depth(self) -> int:
        """Most tokens that one round can accept, the bonus token not included."""
        return max(d.max_depth for d in self.drafters.values())


_last: tuple[Any, CrossSpecConfig] | None = None
"""The settings that were read last, behind what they were read from: they are asked for with every request."""


def settings_of(vllm_config: Any) -> CrossSpecConfig | None:
    """Our resolved settings, as they ride in ``additional_config``; None where there are none."""
    global _last
    additional = getattr(vllm_config, "additional_config", None)
    if not isinstance(additional, Mapping) or ADDITIONAL_CONFIG_KEY not in additional:
        return None
    given = additional[ADDITIONAL_CONFIG_KEY]
    if _last is None or _last[0] is not given:
        _last = given, CrossSpecConfig(**given)
    return _last[1]
