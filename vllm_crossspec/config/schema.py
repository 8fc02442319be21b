"""Our settings and their types: what ``--speculative-config`` may say, and what rides to the workers.

What each key does is in docs/use/configuration.md.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, StrictBool, StrictFloat, StrictInt
from pydantic_core import PydanticCustomError

from vllm_crossspec.kinds.contemplate_layout import planned_tokens
from vllm_crossspec.kinds.drafter import DrafterKind, drafter_kind
from vllm_crossspec.kinds.policy import PolicyKind, policy_kind, policy_kinds
from vllm_crossspec.kinds.registry import load
from vllm_crossspec.kinds.settings import MAX_DRAFT_TOKENS, Settings, is_number
from vllm_crossspec.kinds.tree import TreeConfig

ADDITIONAL_CONFIG_KEY = "crossspec"
"""Where the resolved settings ride to the workers, inside vLLM's ``additional_config``."""

META_METHODS = ("whiflash",)


def _known_threshold(value: Any) -> Any:
    """A number becomes a list of one; several sentences of pydantic's become one of ours."""
    if value != "auto" and not _are_numbers(value):
        raise PydanticCustomError("threshold", "should be 'auto', a number, or a list of numbers")
    return value if value == "auto" or isinstance(value, list | tuple) else (value,)


def _known_policy(value: Any) -> Any:
    *names, last = policy_kinds()
    if value not in (*names, last):
        known = f"{', '.join(map(repr, names))} or {last!r}"
        raise PydanticCustomError("policy", "input should be {known}", {"known": known})
    return value


def _known_categories(value: Any) -> Any:
    """Thresholds of each category become a list of numbers."""
    if not isinstance(value, Mapping) or not all(name and _are_numbers(given) for name, given in value.items()):
        raise PydanticCustomError(
            "categories", 'should be a number, or a list of them, for each category, as in {"math": 0.5}'
        )
    return {name: given if isinstance(given, list | tuple) else (given,) for name, given in value.items()}


def _are_numbers(value: Any) -> bool:
    return all(is_number(number, int | float) for number in (value if isinstance(value, list | tuple) else (value,)))


def _path_alone(value: Any) -> Any:
    return {"model": value} if isinstance(value, str) else value


class NgramConfig(Settings):
    """The n-gram store by which trees of a parallel drafter are pruned; a path alone stands for ``model``."""

    model: str = Field(min_length=1)
    placement: Literal["host", "gpu"] = "gpu"
    budget_gib: StrictFloat = Field(4.0, gt=0)
    order: StrictInt | None = Field(None, ge=2, le=5)
    backoff: StrictFloat | None = Field(None, gt=0, le=1)


class HeadConfig(Settings):
    """A drafter's output layer in the place of the dense one; a path alone stands for ``model``."""

    type: Literal["flashhead"] = "flashhead"
    model: str | None = Field(None, min_length=1)
    num_probes: StrictInt | None = Field(None, ge=1)
    clusters: Literal["nearest", "drawn"] = "nearest"
    grouped: StrictBool = False
    centroid_dtype: Literal["float32", "bfloat16", "float16", "float8_e4m3fn"] | None = None


class LookupConfig(Settings):
    """What a drafter without weights looks for; what is left out is as its kind has it.

    With ``share`` one user's text can show in how long another's answer takes.
    """

    min_match: StrictInt | None = Field(None, ge=1, le=64)
    max_match: StrictInt | None = Field(None, ge=1, le=64)
    num_matches: StrictInt | None = Field(None, ge=1, le=32)
    share: StrictBool = False
    cache_tokens: StrictInt = Field(1 << 20, ge=64, le=1 << 26)


class AdaptiveConfig(Settings):
    """How deep and wide the tree of one request is in one round; a path alone stands for ``model``."""

    type: Literal["heterospec", "record"] = "heterospec"
    model: str | None = Field(None, min_length=1)
    max_extension: StrictInt | None = Field(None, ge=0, le=32)


class AdaptivePolicy(NamedTuple):
    """What the tree of a request in bin i is given; B bins, the surest first.

    A tree is in the first bin whose threshold Phi does not exceed; above all of them, and where Phi is not a number,
    in the last.

    Attributes:
        thresholds: B - 1 rising values of Phi, in nats.
        extensions: B numbers of levels beyond the tree's depth.
        widths: B most draft nodes that are verified.
    """

    thresholds: tuple[float, ...]
    extensions: tuple[int, ...]
    widths: tuple[int, ...]

    @property
    def max_extension(self) -> int:
        """Most levels beyond the tree's depth."""
        return max(self.extensions)

    @property
    def is_flat(self) -> bool:
        """Whether all bins are given the same."""
        return len(set(zip(self.extensions, self.widths, strict=True))) == 1

    def bin_of(self, phi: float) -> int:
        """The bin of one tree, from 0."""
        return sum(not phi <= threshold for threshold in self.thresholds)


class RouterConfig(Settings):
    """Which drafter drafts for a request in a round."""

    policy: Annotated[str, BeforeValidator(_known_policy)] = "goodput"
    drafter: str | None = None
    model: str | None = None
    threshold: Annotated[Literal["auto"] | tuple[float, ...], BeforeValidator(_known_threshold)] = "auto"
    by_category: Annotated[dict[str, tuple[float, ...]], BeforeValidator(_known_categories)] = Field({})
    entropy_of: Literal["model", "sampling"] = "model"
    costs: str | None = Field(None, min_length=1)
    max_backlog: StrictInt = Field(512, ge=1, le=1 << 20)
    explore: StrictBool = True
    correct: StrictBool = True
    lazy: StrictBool = True
    wait: StrictBool = True

    @property
    def kind(self) -> PolicyKind:
        """The entry of its policy in the registry."""
        return policy_kind(self.policy, "speculative_config.router.policy")


class DrafterConfig(Settings):
    """One drafter.

    Attributes:
        kind: entry of the drafter registry (``kinds.drafter``).
        model: empty for a drafter that has none.
        num_speculative_tokens: None before it is resolved.
        target_layers: target layers that it taps in vLLM's numbering; empty before they are resolved.
        native: keys that vLLM's own SpeculativeConfig understands, handed through.
        overrides: what vLLM is told in the place of what the checkpoint's config.json says.
        policy: what its trees are given by ``adaptive``; None where all are the same, or before it is resolved.
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
    native: dict[str, Any] = Field({})
    overrides: dict[str, int] = Field({})
    policy: AdaptivePolicy | None = None

    @property
    def traits(self) -> DrafterKind:
        """The entry of its kind in the registry."""
        return drafter_kind(self.kind, "speculative_config")

    def load_proposer(self) -> Any:
        """The class that drafts for it; imports vLLM."""
        return load(self.traits.proposer if self.tree.is_chain else self.traits.tree_proposer)

    @property
    def depth(self) -> int:
        """K, once it is resolved: deepest level of its drafts, those apart that adaptive trees grow beyond it."""
        assert self.num_speculative_tokens is not None
        return self.num_speculative_tokens

    @property
    def max_depth(self) -> int:
        """Most tokens that it drafts one after another: its depth, and what adaptive trees may grow beyond."""
        return (self.num_speculative_tokens or 0) + (self.policy.max_extension if self.policy is not None else 0)

    @property
    def records_trees(self) -> bool:
        """Whether what became of each tree is kept; all are of one size then."""
        return self.adaptive is not None and self.adaptive.type == "record"

    @property
    def is_adaptive(self) -> bool:
        """Whether its trees differ in size by request and round."""
        return self.adaptive is not None and not self.records_trees


class CrossSpecConfig(Settings):
    """The whole of our settings.

    Attributes:
        method: as the user wrote it.
        drafters: by name; the first is the one whose vLLM method carries the engine.
        router: None where there is one drafter.
        draft_sample_method: None: coupled under ``match``, vLLM's default under ``rejection``.
        num_speculative_tokens: most draft tokens of a request that are verified; None before it is resolved.
        router_facts: what the router's folder says (``routing.checkpoint.RouterFacts``); None without one.
        costs: of rounds (``load.costs.RoundCosts``), read from ``router.costs``; None without that file.
    """

    method: str
    drafters: dict[str, DrafterConfig]
    router: RouterConfig | None = None
    verification: Literal["match", "rejection"] = "match"
    draft_sample_method: Literal["coupled", "greedy", "probabilistic"] | None = None
    num_speculative_tokens: StrictInt | None = Field(None, ge=1, le=MAX_DRAFT_TOKENS)
    router_facts: Any = None
    costs: Any = None

    @property
    def active(self) -> str:
        """Name of the drafter that drafts."""
        return (self.router.drafter if self.router else None) or next(iter(self.drafters))

    def without_idle(self) -> "CrossSpecConfig":
        """Of these settings, as they were parsed, what can ever draft: by policy ``fixed`` one drafter, as if alone."""
        if self.router is None or not self.router.kind.is_fixed:
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
    def records_drafts(self) -> bool:
        """Whether every drafter drafts, and none of it is verified."""
        return self.router is not None and self.router.kind.records

    @property
    def routing_order(self) -> tuple[str, ...]:
        """Names of the drafters as routers number them: autoregressive ones first; the last is the reference."""
        return tuple(sorted(self.drafters, key=lambda name: not self.drafters[name].traits.is_autoregressive))

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
        if drafter.traits.supplies == "none":
            return 0
        return drafter.tree.num_nodes or drafter.num_speculative_tokens or 0

    def depth_of(self, name: str) -> int:
        """Most draft tokens of this drafter that a round can accept."""
        return min(self.width_of(name), self.drafters[name].max_depth)

    @property
    def routes_load(self) -> bool:
        """Whether the router itself drops drafts where they cost more than they bring."""
        router = self.router
        by_experience = router is not None and router.policy == "goodput" and router.model is None
        return by_experience and any(drafter.traits.supplies == "none" for drafter in self.drafters.values())

    @property
    def differs_in_width(self) -> bool:
        """Whether the requests of a batch may bring different numbers of draft rows."""
        return self.is_adaptive or (self.is_routed and len(set(map(self.width_of, self.drafters))) > 1)

    @property
    def shares_rows(self) -> bool:
        """Whether a step's draft rows are shared out among the trees of all its requests (``budget``)."""
        return any(d.tree.budget == "batch" for d in self.drafters.values())

    @property
    def has_trees(self) -> bool:
        """Whether any drafter drafts more than chains."""
        return any(not d.tree.is_chain for d in self.drafters.values())

    @property
    def contemplates(self) -> bool:
        """Whether the target runs a contemplate row for every row that it verifies."""
        return any(d.traits.contemplates for d in self.drafters.values())

    @property
    def rows_per_node(self) -> int:
        """Rows of the target's step for every row that it verifies."""
        return 2 if self.contemplates else 1

    def planned(self, num_nodes: int) -> int:
        """Draft tokens of a request to vLLM's scheduler, contemplate rows included, for so many draft nodes."""
        return planned_tokens(num_nodes, self.contemplates)

    @property
    def num_nodes(self) -> int:
        """N, once it is resolved: draft nodes of a request that are verified."""
        assert self.num_speculative_tokens is not None
        return self.num_speculative_tokens

    @property
    def num_rows(self) -> int:
        """Most rows of a request in the target's step: the root, the draft nodes, and contemplate rows."""
        return self.planned(self.num_nodes) + 1

    @property
    def is_coupled(self) -> bool:
        """Whether candidates are ranked with the target's noise for sampled requests."""
        return self.verification == "match" and self.draft_sample_method != "greedy"

    @property
    def starts_from_last_token(self) -> bool:
        """Whether a drafter's round starts from one row a request, the last accepted token.

        The tokens before it are in the drafter's cache already. Otherwise it starts from all rows of the target's step.
        """
        return self.is_routed and not self.records_drafts

    @property
    def policies(self) -> dict[str, AdaptivePolicy]:
        """How each drafter's trees are sized, by name; without those whose trees are all the same."""
        return {name: d.policy for name, d in self.drafters.items() if d.is_adaptive and d.policy is not None}

    @property
    def is_adaptive(self) -> bool:
        """Whether any drafter's trees differ in size by request and round."""
        return any(d.is_adaptive for d in self.drafters.values())

    @property
    def measures_load(self) -> bool:
        """Whether draft tokens by running requests are chosen from what steps cost at start-up."""
        return any(d.tree.by_batch_size == "auto" for d in self.drafters.values())

    @property
    def max_depth(self) -> int:
        """Most tokens that one round can accept, the bonus token not included."""
        return max(d.max_depth for d in self.drafters.values())


class Carried(str):
    """Settings as they ride in ``additional_config``: vLLM hashes the text, and hands the object to its processes."""

    settings: CrossSpecConfig


def carried(settings: CrossSpecConfig) -> dict[str, Carried]:
    """What ``additional_config`` has of them."""
    text = Carried(repr(settings))
    text.settings = settings
    return {ADDITIONAL_CONFIG_KEY: text}


def settings_of(vllm_config: Any) -> CrossSpecConfig | None:
    """Our resolved settings; None where there are none."""
    additional = getattr(vllm_config, "additional_config", None)
    found = additional.get(ADDITIONAL_CONFIG_KEY) if isinstance(additional, Mapping) else None
    return found.settings if isinstance(found, Carried) else None
