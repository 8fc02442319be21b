"""Our part of ``--speculative-config``: what users may write, checked before anything is loaded.

A dictionary is ours when its method is ours alone (``whiflash``), or when it is ``eagle3`` or ``dflash`` with any of
our keys (``tree``, ``verification``). Everything else is vLLM's own and stays untouched.
"""

import difflib
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from vllm_crossspec.drafters.base import drafter_kind, drafter_kinds

ADDITIONAL_CONFIG_KEY = "crossspec"
"""Where the resolved settings ride to the workers, inside vLLM's ``additional_config``."""

META_METHODS = ("whiflash",)
OUR_KEYS = ("tree", "verification", "drafters", "router")
_TOP_KEYS = ("verification", "draft_sample_method")
_REJECTION_KEYS = {"rejection_sample_method", "synthetic_acceptance_rates", "synthetic_acceptance_length"}


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


M = TypeVar("M", bound=_Model)


def _known_schedule(value: Any) -> Any:
    """Two sentences of pydantic's, one for each kind of schedule, become one of ours."""
    if value is None or value == "auto" or isinstance(value, Mapping):
        return value
    raise PydanticCustomError("schedule", "should be 'auto' or draft tokens by running requests as in {{\"1\": 60}}")


Schedule = Annotated[Literal["auto"] | dict[int, int], BeforeValidator(_known_schedule)]


class TreeConfig(_Model):
    """How a drafter's candidates become a draft.

    Attributes:
        type: ``chain`` is the drafter's first choice at every position; ``dynamic`` expands the best nodes depth by
            depth and keeps the best of all (EAGLE-2, section 4; autoregressive drafters); ``best_first`` keeps the
            most probable prefixes under the product of marginals (parallel drafters). Left out, it is the drafter's
            own kind of tree where one of the sizes is given, else a chain.
        depth: deepest level of a ``dynamic`` tree, tokens.
        top_k: children of a node and width of a level; for ``best_first``, candidates at a position.
        num_nodes: draft tokens that the target verifies at once.
        by_batch_size: most draft tokens of a request by the number of running requests, as ``{"1": 60, "8": 30,
            "32": 3, "64": 0}``: from 8 requests on 30, from 64 on none. "auto" chooses from what steps cost, measured
            at start-up; a tree for which nothing is given means it, and where it cannot be measured (on a CPU, with
            data parallelism) has no schedule. ``{"1": 60}`` keeps the whole tree at every load.
    """

    type: Literal["chain", "dynamic", "best_first"] = "chain"
    depth: int | None = Field(None, ge=1, le=64)
    top_k: int | None = Field(None, ge=1, le=255)
    num_nodes: int | None = Field(None, ge=1, le=255)
    by_batch_size: Schedule | None = None

    @property
    def is_chain(self) -> bool:
        """Whether every node has one child."""
        return self.type == "chain"


class RouterConfig(_Model):
    """Which drafter drafts for a request in a round.

    Attributes:
        policy: ``fixed`` is always ``drafter``; ``entropy`` and ``neural`` are WhiFlash's (Kwon et al. 2026, section
            3.3); ``goodput`` takes the drafter with the most expected tokens per second. ``record`` is what
            ``crossspec collect`` uses: every drafter drafts, nothing is verified.
        drafter: of policy ``fixed``, a key of ``drafters``.
        model: folder of a trained router (``neural``, ``goodput``; for ``entropy`` it says what "auto" means).
        threshold: ``entropy``: nats above which the autoregressive drafter drafts; ``neural``: tokens by which it must
            be expected to do better. One number, or one for each drafter but the last in routing order. "auto" is set
            from the drafters' costs.
        max_backlog: most tokens that a request's inactive drafter may miss before it catches up.
        lazy: whether inactive drafters wait; if not, all of them catch up in every round.
    """

    policy: Literal["fixed", "entropy", "neural", "goodput", "record"] = "entropy"
    drafter: str | None = None
    model: str | None = None
    threshold: Literal["auto"] | float | tuple[float, ...] = "auto"
    max_backlog: int = Field(512, ge=1, le=1 << 20)
    lazy: bool = True


class DrafterConfig(_Model):
    """One drafter.

    Attributes:
        kind: entry of the drafter registry (``eagle3``, ``dflash``).
        model: folder or hub id of its checkpoint.
        num_speculative_tokens: most tokens that it drafts in a round; None before it is resolved.
        tree: what its candidates become.
        target_layers: target layers that it taps in vLLM's numbering; empty before they are resolved.
        native: keys that vLLM's own SpeculativeConfig understands, handed through.
    """

    kind: str
    model: str = Field(min_length=1)
    num_speculative_tokens: int | None = Field(None, ge=1)
    tree: TreeConfig = TreeConfig()
    target_layers: tuple[int, ...] = ()
    native: dict[str, Any] = {}


class CrossSpecConfig(_Model):
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
        num_speculative_tokens: draft tokens that the scheduler plans for; None before it is resolved.
    """

    method: str
    drafters: dict[str, DrafterConfig]
    router: RouterConfig | None = None
    verification: Literal["match", "rejection"] = "match"
    draft_sample_method: Literal["coupled", "greedy", "probabilistic"] | None = None
    num_speculative_tokens: int | None = Field(None, ge=1)

    @property
    def active(self) -> str:
        """Name of the drafter that drafts."""
        return (self.router.drafter if self.router else None) or next(iter(self.drafters))

    @property
    def routes(self) -> bool:
        """Whether drafters are chosen by request and round; if not, one of them always drafts."""
        return len(self.drafters) > 1 and self.verification == "match"

    @property
    def routing_order(self) -> tuple[str, ...]:
        """Names of the drafters as routers number them: autoregressive ones first; the last is the reference."""
        return tuple(
            sorted(self.drafters, key=lambda name: not drafter_kind(self.drafters[name].kind, "").is_autoregressive)
        )

    @property
    def has_trees(self) -> bool:
        """Whether any drafter drafts more than chains."""
        return any(not d.tree.is_chain for d in self.drafters.values())

    @property
    def measures_load(self) -> bool:
        """Whether draft tokens by running requests are chosen from what steps cost at start-up."""
        return any(d.tree.by_batch_size == "auto" for d in self.drafters.values())

    @property
    def max_depth(self) -> int:
        """Most tokens that one round can accept, the bonus token not included."""
        return max(d.num_speculative_tokens or 0 for d in self.drafters.values())


def is_ours(raw: Mapping[str, Any], native_methods: Collection[str]) -> bool:
    """Whether this speculative config is for our proposers.

    Raises:
        ValueError: the method is neither vLLM's nor ours.
    """
    method = raw.get("method")
    if method in META_METHODS:
        return True
    if method is not None and method not in native_methods:
        known = sorted({*native_methods, *META_METHODS})
        raise ValueError(f"speculative_config: unknown method {method!r}{_nearest(str(method), known)}")
    return method in drafter_kinds() and any(key in raw for key in OUR_KEYS)


def parse(raw: Mapping[str, Any], native_keys: Collection[str]) -> CrossSpecConfig:
    """Check the user's dictionary and give it its types.

    Args:
        raw: as written after ``--speculative-config``.
        native_keys: fields of vLLM's own SpeculativeConfig, handed through to it.

    Raises:
        ValueError: one sentence that names the key and what it should be.
    """
    method = raw["method"]
    if method not in META_METHODS:
        for key in ("drafters", "router"):
            if key in raw:
                raise ValueError(f"speculative_config.{key} belongs to method {META_METHODS[0]!r}, not to {method!r}")
        drafter = _drafter(method, {k: v for k, v in raw.items() if k not in ("method", *_TOP_KEYS)}, "", native_keys)
        top = {k: raw[k] for k in _TOP_KEYS if k in raw}
        return _check(_build(CrossSpecConfig, {"method": method, "drafters": {method: drafter}, **top}, ""))
    return _parse_meta(raw, native_keys)


def _check(config: CrossSpecConfig) -> CrossSpecConfig:
    """Refuse what does not go together, as far as it can be seen without the checkpoints."""
    single = config.method not in META_METHODS
    for name, drafter in config.drafters.items():
        key = "speculative_config." + ("" if single else f"drafters.{name}.") + "tree"
        tree, kind = drafter.tree, drafter_kind(drafter.kind, key)
        if not tree.is_chain and tree.type != kind.tree:
            raise ValueError(
                f"{key}.type {tree.type!r} does not suit a {kind.name} drafter; use {kind.tree!r} or 'chain'"
            )
        if not tree.is_chain and config.verification == "rejection":
            raise ValueError(
                f"{key}: vLLM's rejection sampler verifies chains only; leave out verification, or the tree"
            )
        if tree.is_chain and (tree.depth or tree.top_k or tree.num_nodes):
            raise ValueError(f"{key}.type 'chain' takes no depth, top_k or num_nodes; use num_speculative_tokens")
        if tree.type == "dynamic" and (tree.top_k or 0) > 32:
            raise ValueError(f"{key}.top_k is {tree.top_k}; a dynamic tree takes at most 32")
        if tree.type == "best_first" and tree.depth is not None:
            raise ValueError(f"{key}.depth: a best_first tree is as deep as num_speculative_tokens; use that key")
        if tree.by_batch_size == "auto" and config.verification != "match":
            raise ValueError(f"{key}.by_batch_size 'auto' needs verification 'match'; give the draft tokens yourself")
        _check_schedule(tree, key)
        for native in sorted(_REJECTION_KEYS & drafter.native.keys()):
            if config.verification != "rejection":
                raise ValueError(
                    f'speculative_config.{native} is about vLLM\'s rejection sampler; add "verification": "rejection"'
                )
    method, wanted = config.draft_sample_method, {"coupled": "match", "probabilistic": "rejection"}
    if method in wanted and config.verification != wanted[method]:
        raise ValueError(
            f"speculative_config.draft_sample_method {method!r} needs verification {wanted[method]!r}, "
            f"which is {config.verification!r}"
        )
    return config


def _check_schedule(tree: TreeConfig, key: str) -> None:
    schedule = tree.by_batch_size
    if schedule is None or schedule == "auto":
        return
    sizes = sorted(schedule)
    if not sizes or sizes[0] != 1 or any(n < 0 or n > 255 for n in schedule.values()):
        raise ValueError(
            f"{key}.by_batch_size must say from 1 running request on how many tokens (0 to 255) to draft, "
            'as in {"1": 60, "16": 0}'
        )


def _parse_meta(raw: Mapping[str, Any], native_keys: Collection[str]) -> CrossSpecConfig:
    known = ("method", "num_speculative_tokens", "drafters", "router", *_TOP_KEYS)
    _check_keys(raw, known, "")
    drafters = raw.get("drafters")
    if not isinstance(drafters, Mapping) or not drafters:
        raise ValueError(
            'speculative_config.drafters must name at least one drafter, as in {"eagle3": {"model": "FOLDER"}}'
        )
    named = {}
    for name, settings in drafters.items():
        if not isinstance(settings, Mapping):
            raise ValueError(f"speculative_config.drafters.{name} must be an object with a `model`")
        settings = dict(settings)
        kind = settings.pop("type", name)
        named[name] = _drafter(kind, settings, f"drafters.{name}.", native_keys)
    router = raw.get("router", {})
    if isinstance(router, Mapping) and "policy" not in router:
        fixed = "drafter" in router or len(named) == 1
        router = {"policy": "fixed" if fixed else "entropy", **router}
    fields = {k: raw[k] for k in ("num_speculative_tokens", *_TOP_KEYS) if k in raw}
    config = _build(CrossSpecConfig, {"method": raw["method"], "drafters": named, "router": router, **fields}, "")
    _check_router(config)
    return _check(config)


def _check_router(config: CrossSpecConfig) -> None:
    """Refuse what a policy does not take, or lacks."""
    router, key = config.router, "speculative_config.router"
    assert router is not None
    policy = router.policy
    if router.drafter is not None and policy != "fixed":
        raise ValueError(f"{key}.drafter belongs to policy 'fixed', not to {policy!r}; leave out one of the two")
    if config.active not in config.drafters:
        raise ValueError(
            f"{key}.drafter is {config.active!r}, which is none of drafters{_nearest(config.active, config.drafters)}"
        )
    if policy == "fixed":
        if router.model is not None or router.threshold != "auto":
            raise ValueError(f"{key}: policy 'fixed' takes neither model nor threshold; leave them out")
        return
    if len(config.drafters) < 2:
        raise ValueError(f"{key}.policy {policy!r} chooses between drafters, and there is one; add another to drafters")
    if config.verification != "match":
        raise ValueError(f"{key}.policy {policy!r} needs verification 'match'; leave out verification")
    if policy in ("neural", "goodput") and router.model is None:
        raise ValueError(
            f"{key}.model is missing: policy {policy!r} needs a router trained by `crossspec train router`"
        )
    if router.threshold == "auto":
        return
    if policy in ("goodput", "record"):
        raise ValueError(f"{key}.threshold: policy {policy!r} takes none; leave it out")
    wanted, given = len(config.drafters) - 1, router.threshold
    numbers = given if isinstance(given, tuple) else (given,)
    if len(numbers) != wanted:
        raise ValueError(f"{key}.threshold has {len(numbers)} numbers; {wanted + 1} drafters need {wanted}")
    if policy == "entropy" and (min(numbers) < 0 or list(numbers) != sorted(numbers, reverse=True)):
        raise ValueError(f"{key}.threshold must be nats of 0 or more, falling from drafter to drafter (got {given})")
    if policy == "neural" and not all(abs(number) <= 255 for number in numbers):
        raise ValueError(f"{key}.threshold must be tokens between -255 and 255 (got {given})")


def _drafter(kind: str, raw: Mapping[str, Any], path: str, native_keys: Collection[str]) -> DrafterConfig:
    natural_tree = drafter_kind(kind, f"speculative_config.{path}type").tree
    ours = ("model", "num_speculative_tokens", "tree")
    native = [k for k in native_keys if k not in ("method", *_TOP_KEYS, *ours)]
    _check_keys(raw, (*ours, *native), path)
    if "model" not in raw:
        raise ValueError(f"speculative_config.{path}model is missing; give the drafter's folder or hub id")
    fields = {k: raw[k] for k in ours if k in raw}
    tree = fields.get("tree")
    if isinstance(tree, Mapping) and "type" not in tree and any(k in tree for k in ("depth", "top_k", "num_nodes")):
        fields["tree"] = {"type": natural_tree, **tree}
    return _build(DrafterConfig, {"kind": kind, **fields, "native": {k: raw[k] for k in raw if k not in ours}}, path)


def _check_keys(raw: Mapping[str, Any], known: Collection[str], path: str) -> None:
    for key in raw:
        if key not in known:
            raise ValueError(f"speculative_config: unknown key {path + key!r}{_nearest(key, known)}")


def _build(model: type[M], fields: dict[str, Any], path: str) -> M:
    try:
        return model(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            owners: dict[str, type[_Model]] = {"tree": TreeConfig, "router": RouterConfig}
            owner = owners.get(str(first["loc"][0]))
            known = list(owner.model_fields) if owner else []
            raise ValueError(
                f"speculative_config: unknown key {path + where!r}{_nearest(str(first['loc'][-1]), known)}"
            ) from None
        message = first["msg"][0].lower() + first["msg"][1:]
        raise ValueError(f"speculative_config.{path}{where}: {message} (got {first['input']!r})") from None


def _nearest(word: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(sorted(known))}" if known else ""
