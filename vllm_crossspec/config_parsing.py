"""Reading ``--speculative-config``: checked before anything is loaded, and one sentence for what is wrong.

A dictionary is ours when its method is ours alone (``whiflash``, and drafters that vLLM does not know), or when vLLM
knows a drafter of this name, too, and any of our keys is there (``tree``, ``head``, ``verification``). Everything else
is vLLM's own and stays untouched.
"""

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from vllm_crossspec.config import (
    MAX_DEPTH,
    META_METHODS,
    AdaptiveConfig,
    CrossSpecConfig,
    DrafterConfig,
    HeadConfig,
    LookupConfig,
    NgramConfig,
    RouterConfig,
    Settings,
    TreeConfig,
)
from vllm_crossspec.drafters.base import DrafterKind, drafter_kind, drafter_kinds
from vllm_crossspec.names import nearest
from vllm_crossspec.tree.base import tree_kind

OUR_KEYS = ("tree", "ngram", "head", "adaptive", "lookup", "dtype", "verification", "drafters", "router")
MAX_EXPANSION = 4096
"""Most prefixes that a level of a searched tree may look at."""
_TOP_KEYS = ("verification", "draft_sample_method")
_FORM_KEYS = ("tree", "num_speculative_tokens", "ngram", "adaptive")
"""What a drafter that uses another's weights says itself."""
_PARTS: dict[str, type[Settings]] = {
    "tree": TreeConfig,
    "ngram": NgramConfig,
    "head": HeadConfig,
    "adaptive": AdaptiveConfig,
    "lookup": LookupConfig,
    "router": RouterConfig,
}
_REJECTION_KEYS = {
    "rejection_sample_method", "synthetic_acceptance_rates", "synthetic_acceptance_length",
    "fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k",
}  # fmt: skip

M = TypeVar("M", bound=Settings)


def is_ours(raw: Mapping[str, Any], native_methods: Collection[str], native_keys: Collection[str]) -> bool:
    """Whether this speculative config is for our proposers.

    Args:
        raw: as written after ``--speculative-config``.
        native_methods: that vLLM knows.
        native_keys: fields of vLLM's own SpeculativeConfig.

    Raises:
        ValueError: the method is neither vLLM's nor ours, or a key is neither's, or ours for another method.
    """
    method = raw.get("method")
    if method is not None and not isinstance(method, str):
        raise ValueError(f"speculative_config.method is {method!r}; give the name of a method")
    own = {*META_METHODS, *drafter_kinds()} - {*native_methods}
    if method in own:
        return True
    if method is not None and method not in native_methods:
        known = sorted({*native_methods, *own})
        raise ValueError(f"speculative_config: unknown method {method!r}{nearest(str(method), known)}")
    if method in drafter_kinds() and any(key in raw for key in OUR_KEYS):
        return True
    _check_native(raw, native_keys)
    return False


def _check_native(raw: Mapping[str, Any], native_keys: Collection[str]) -> None:
    """Refuse what vLLM would call an unexpected keyword, where it may be a key of ours mistyped or out of place."""
    method = raw.get("method")
    for key in raw:
        if key in native_keys:
            continue
        if method in drafter_kinds():
            raise ValueError(f"speculative_config: unknown key {key!r}{_hint(key, {*native_keys, *OUR_KEYS}, '')}")
        if key in OUR_KEYS:
            methods = sorted({*META_METHODS, *drafter_kinds()})
            fix = f"method {method!r} has none" if method else 'the "method" is missing'
            raise ValueError(f"speculative_config.{key} is for the methods {', '.join(methods)}; {fix}")


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
        if drafter_kind(method, "speculative_config.method").supplies == "none":
            raise ValueError(
                f"speculative_config.method {method!r} is for a router to choose; to draft nothing at all leave out "
                "--speculative-config"
            )
        drafter = _drafter(method, {k: v for k, v in raw.items() if k not in ("method", *_TOP_KEYS)}, "", native_keys)
        top = {k: raw[k] for k in _TOP_KEYS if k in raw}
        return _check(_build(CrossSpecConfig, {"method": method, "drafters": {method: drafter}, **top}, ""))
    return _parse_meta(raw, native_keys)


def _check(config: CrossSpecConfig) -> CrossSpecConfig:
    """Refuse what does not go together, as far as it can be seen without the checkpoints."""
    for name, drafter in config.drafters.items():
        path = config.path_of(name)
        kind = drafter_kind(drafter.kind, path + "type")
        if not kind.can_share and len(config.drafters) > 1:
            raise ValueError(
                f"speculative_config.drafters.{name}: a {kind.name} drafter reads no states of the target, so that it "
                f"cannot catch up beside others; use it alone, as method {kind.name!r}"
            )
        _check_tree(drafter.tree, kind, path + "tree")
        _check_depth(config, drafter, path)
        _check_schedule(drafter.tree, path + "tree")
        _check_parts(drafter, kind, path)
        _check_verification(config, drafter, kind, path)
    _check_contemplation(config)
    method, wanted = config.draft_sample_method, {"coupled": "match", "probabilistic": "rejection"}
    if method in wanted and config.verification != wanted[method]:
        raise ValueError(
            f"speculative_config.draft_sample_method {method!r} needs verification {wanted[method]!r}, "
            f"which is {config.verification!r}"
        )
    return config


def _check_contemplation(config: CrossSpecConfig) -> None:
    """Refuse what contemplate rows do not go with; the target runs one set of them in a step."""
    kinds = {name: drafter_kind(drafter.kind, "") for name, drafter in config.drafters.items()}
    names = [name for name, kind in kinds.items() if kind.contemplates]
    if len(names) > 1:
        raise ValueError(
            f"speculative_config.drafters: {' and '.join(names)} would both have the target contemplate for them; "
            f"use one {kinds[names[0]].name} drafter"
        )
    if names and config.verification != "match":
        raise ValueError(
            "speculative_config.verification 'rejection' knows no contemplate rows; leave it out for a "
            f"{kinds[names[0]].name} drafter"
        )


def _check_parts(drafter: DrafterConfig, kind: DrafterKind, path: str) -> None:
    """Refuse a head that stands in for none, and n-grams and adaptive sizes for trees that are not of their kind."""
    tree = drafter.tree
    if drafter.head is not None and not kind.has_head:
        raise ValueError(f"{path}head: a {kind.name} drafter has no output layer; leave out head")
    if drafter.adaptive is not None:
        if tree.type != "dynamic":
            raise ValueError(
                f"{path}adaptive sizes 'dynamic' trees, and this drafter drafts {tree.type!r}; "
                f"leave it out, or give an autoregressive drafter a {path}tree"
            )
        _check_adaptive(drafter.adaptive, path + "adaptive")
    if drafter.ngram is not None and tree.type not in ("best_first", "continuity"):
        raise ValueError(
            f"{path}ngram helps 'best_first' and 'continuity' trees, and this drafter drafts "
            f"{tree.type!r}; leave it out, or change {path}tree.type"
        )
    lookup = drafter.lookup
    if lookup is not None and not kind.lookup:
        raise ValueError(f"{path}lookup: a {kind.name} drafter looks nothing up; leave it out")
    if lookup is not None and (lookup.min_match or 1) > (lookup.max_match or 1):
        raise ValueError(
            f"{path}lookup.min_match is {lookup.min_match}, and at most {lookup.max_match} tokens are compared "
            "(max_match); make it smaller"
        )
    if drafter.ngram is None and tree.ngram_weight:
        raise ValueError(f"{path}tree.ngram_weight needs n-grams; name a store in {path}ngram")


def _check_verification(config: CrossSpecConfig, drafter: DrafterConfig, kind: DrafterKind, path: str) -> None:
    """Refuse what vLLM's rejection sampler does not verify, and what only it knows."""
    key, tree = path + "tree", drafter.tree
    if config.draft_sample_method == "probabilistic":
        if not kind.can_sample:
            raise ValueError(
                f"speculative_config.draft_sample_method 'probabilistic' is not for a {kind.name} drafter; use 'greedy'"
            )
        if drafter.head is not None:
            raise ValueError(
                "speculative_config.draft_sample_method 'probabilistic' needs every token's probability, which "
                f"{path}head does not compute; use 'greedy', or leave out the head"
            )
    if not tree.is_chain and config.verification == "rejection":
        raise ValueError(
            f"{key}: vLLM's rejection sampler verifies chains only; leave out verification, or use "
            '"tree": {"type": "chain"}'
        )
    if tree.by_batch_size == "auto" and config.verification != "match":
        raise ValueError(f"{key}.by_batch_size 'auto' needs verification 'match'; give the draft tokens yourself")
    if "draft_lm_head_quantization" in drafter.native:
        raise ValueError(
            f"{path}draft_lm_head_quantization would change nothing: the drafters of vllm_crossspec take "
            "the target's output layer as it is; leave it out, or use a head of clusters (head)"
        )
    for native in sorted(_REJECTION_KEYS & drafter.native.keys()):
        if config.verification != "rejection":
            raise ValueError(
                f'speculative_config.{native} is about vLLM\'s rejection sampler; add "verification": "rejection"'
            )


def _check_tree(tree: TreeConfig, kind: DrafterKind, key: str) -> None:
    """Refuse a tree that the drafter cannot feed, and sizes that this kind of tree does not have."""
    if not tree.is_chain and tree_kind(tree.type, key).needs != kind.supplies:
        fix = "it drafts chains alone: leave out the tree" if kind.tree == "chain" else f"use {kind.tree!r} or 'chain'"
        raise ValueError(f"{key}.type {tree.type!r} does not suit a {kind.name} drafter; {fix}")
    if tree.is_chain and (tree.depth or tree.top_k or tree.num_nodes):
        raise ValueError(f"{key}.type 'chain' takes no depth, top_k or num_nodes; use num_speculative_tokens")
    if tree.type == "dynamic" and (tree.top_k or 0) > 32:
        raise ValueError(f"{key}.top_k is {tree.top_k}; a dynamic tree takes at most 32")
    if tree.type == "matches" and tree.top_k is not None:
        raise ValueError(f"{key}.top_k: a matches tree has as many branches as were found; leave it out")
    if tree.type in ("best_first", "continuity", "matches") and tree.depth is not None:
        raise ValueError(f"{key}.depth: a {tree.type} tree is as deep as num_speculative_tokens; use that key")
    if tree.type == "continuity" and (tree.top_k or 0) * (tree.beam_width or 1) > MAX_EXPANSION:
        raise ValueError(
            f"{key}.top_k * {key}.beam_width is {(tree.top_k or 0) * (tree.beam_width or 1)} prefixes a level; "
            f"use at most {MAX_EXPANSION}"
        )
    takers = {
        "beam_width": ("continuity",),
        "ngram_weight": ("best_first", "continuity"),
        "logit_decay": ("continuity",),
        "level_decay": ("continuity",),
        "sharpness": ("dynamic", "best_first", "continuity"),
    }
    for name, types in takers.items():
        if getattr(tree, name) is not None and tree.type not in types:
            raise ValueError(f"{key}.{name} is for {' and '.join(types)} trees, not for {tree.type!r}; leave it out")


def _check_depth(config: CrossSpecConfig, drafter: DrafterConfig, path: str) -> None:
    """Refuse more levels than a tree has where they are given as draft tokens."""
    tokens = drafter.num_speculative_tokens
    if drafter.tree.is_chain and drafter_kind(drafter.kind, "").contemplates:  # verified as a tree of one branch
        tokens = tokens or config.num_speculative_tokens
    elif drafter.tree.type != "dynamic" or drafter.tree.depth is not None:
        return
    if (tokens or 0) > MAX_DEPTH:
        raise ValueError(
            f"{path}num_speculative_tokens is {tokens}, and this drafter's drafts are at most {MAX_DEPTH} levels deep; "
            f"use {MAX_DEPTH} or less"
        )


def _check_adaptive(adaptive: AdaptiveConfig, key: str) -> None:
    if adaptive.type == "heterospec" and adaptive.model is None:
        raise ValueError(f"{key}.model is missing; give the file that `crossspec calibrate heterospec` wrote")
    if adaptive.type == "record" and (adaptive.model is not None or adaptive.max_extension is not None):
        raise ValueError(f"{key}: type 'record' takes neither model nor max_extension; leave them out")


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
        wanted = "must name at least one drafter" if not drafters else "must be an object that names each drafter"
        raise ValueError(f'speculative_config.drafters {wanted}, as in {{"eagle3": {{"model": "FOLDER"}}}}')
    named = {}
    for name, settings in drafters.items():
        if not isinstance(settings, Mapping):
            raise ValueError(f"speculative_config.drafters.{name} must be an object with a `model`")
        path = f"drafters.{name}."
        own = _with_owner(drafters, name) if "of" in settings else dict(settings)
        kind = own.pop("type", name)
        drafter = _drafter(kind, own, path, native_keys)
        named[name] = drafter.model_copy(update={"of": settings.get("of")})
    router = raw.get("router", {})
    if isinstance(router, Mapping) and "policy" not in router:
        fixed = "drafter" in router or len(named) == 1
        router = {"policy": "fixed" if fixed else "goodput", **router}
    fields = {k: raw[k] for k in ("num_speculative_tokens", *_TOP_KEYS) if k in raw}
    config = _build(CrossSpecConfig, {"method": raw["method"], "drafters": named, "router": router, **fields}, "")
    _check_router(config)
    return _check(config)


def _with_owner(drafters: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The settings of a drafter that uses another's weights: its own over the other's."""
    own, key = drafters[name], f"speculative_config.drafters.{name}"
    owner = own["of"]
    found = drafters.get(owner) if isinstance(owner, str) else None
    if not isinstance(found, Mapping) or owner == name:
        others = [other for other in drafters if other != name]
        raise ValueError(f"{key}.of must name another of the drafters, not {owner!r}{nearest(str(owner), others)}")
    if "of" in found:
        raise ValueError(f"{key}.of: {owner} uses the weights of {found['of']} itself; name that one")
    for setting in own:
        if setting not in ("of", *_FORM_KEYS):
            raise ValueError(f"{key}.{setting} is the same for all that use one drafter; say it in drafters.{owner}")
    kind = drafter_kind(found.get("type", owner), f"speculative_config.drafters.{owner}.type")
    if not kind.has_model or kind.contemplates:
        why = "has no weights to share" if not kind.has_model else "contemplates for one form of drafts alone"
        raise ValueError(f"{key}.of: a {kind.name} drafter {why}; name another")
    kept = {k: v for k, v in found.items() if k not in _FORM_KEYS}
    return {"type": kind.name, **kept, **{k: v for k, v in own.items() if k != "of"}}


def _check_router(config: CrossSpecConfig) -> None:
    """Refuse what a policy does not take, or lacks."""
    router, key = config.router, "speculative_config.router"
    assert router is not None
    policy = router.policy
    if router.drafter is not None and policy != "fixed":
        raise ValueError(f"{key}.drafter belongs to policy 'fixed', not to {policy!r}; leave out one of the two")
    if config.active not in config.drafters:
        raise ValueError(
            f"{key}.drafter is {config.active!r}, which is none of drafters{nearest(config.active, config.drafters)}"
        )
    if policy == "fixed":
        if router.model is not None or router.threshold != "auto" or router.by_category or router.costs is not None:
            raise ValueError(f"{key}: policy 'fixed' takes neither model, thresholds nor costs; leave them out")
        return
    if len(config.drafters) < 2:
        raise ValueError(f"{key}.policy {policy!r} chooses between drafters, and there is one; add another to drafters")
    if config.verification != "match":
        raise ValueError(f"{key}.policy {policy!r} needs verification 'match'; leave out verification")
    if policy == "neural" and router.model is None:
        raise ValueError(
            f"{key}.model is missing: policy {policy!r} needs a router trained by `crossspec train router`"
        )
    if "explore" in router.model_fields_set and (policy != "goodput" or router.model is not None):
        raise ValueError(f"{key}.explore is for policy 'goodput' without a model; leave it out")
    if "correct" in router.model_fields_set and (policy not in ("neural", "goodput") or router.model is None):
        raise ValueError(
            f"{key}.correct is for a trained router: policy 'neural', or 'goodput' with model; leave it out"
        )
    reads_entropy = policy == "entropy" or (policy == "goodput" and router.model is None)
    if router.entropy_of == "sampling" and not reads_entropy:
        raise ValueError(f"{key}.entropy_of is for policy 'entropy', or 'goodput' without a model; leave it out")
    given = {f"by_category.{name}": numbers for name, numbers in router.by_category.items()}
    if router.threshold != "auto":
        given["threshold"] = router.threshold if isinstance(router.threshold, tuple) else (router.threshold,)
    if given and policy in ("goodput", "record"):
        raise ValueError(f"{key}.{next(iter(given))}: policy {policy!r} takes no thresholds; leave it out")
    for name, numbers in given.items():
        _check_thresholds(policy, numbers, len(config.drafters) - 1, f"{key}.{name}")


def _check_thresholds(policy: str, numbers: tuple[float, ...], wanted: int, key: str) -> None:
    if len(numbers) != wanted:
        raise ValueError(f"{key} has {len(numbers)} numbers; {wanted + 1} drafters need {wanted}")
    if policy == "entropy" and (min(numbers) < 0 or list(numbers) != sorted(numbers, reverse=True)):
        raise ValueError(f"{key} must be nats of 0 or more, falling from drafter to drafter (got {numbers})")
    if policy == "neural" and not all(abs(number) <= 255 for number in numbers):
        raise ValueError(f"{key} must be tokens between -255 and 255 (got {numbers})")


def _drafter(kind: str, raw: Mapping[str, Any], path: str, native_keys: Collection[str]) -> DrafterConfig:
    own_kind = drafter_kind(kind, f"speculative_config.{path}type")
    ours = ("model", "num_speculative_tokens", "tree", "ngram", "head", "adaptive", "lookup", "dtype")
    native = [k for k in native_keys if k not in ("method", *_TOP_KEYS, *ours)]
    _check_keys(raw, (*ours, *native), path)
    fields = {k: raw[k] for k in ours if k in raw}
    if not own_kind.has_model:
        _check_without_model(own_kind, raw, path)
        fields["model"] = ""
        if own_kind.lookup and isinstance(lookup := fields.get("lookup", {}), Mapping):
            fields["lookup"] = {**own_kind.lookup, **lookup}
    elif not raw.get("model"):
        raise ValueError(f"speculative_config.{path}model is missing; give the drafter's folder or hub id")
    tree = fields.get("tree")
    if own_kind.drafts_trees:
        tree = fields.setdefault("tree", {})
    if isinstance(tree, Mapping) and "type" not in tree and (own_kind.drafts_trees or tree.keys() - {"by_batch_size"}):
        fields["tree"] = {"type": own_kind.tree, **tree}
    if own_kind.head is not None:
        head = fields.setdefault("head", {})
        if isinstance(head, Mapping):
            fields["head"] = {"type": own_kind.head, **head}
    return _build(DrafterConfig, {"kind": kind, **fields, "native": {k: raw[k] for k in raw if k not in ours}}, path)


def _check_without_model(kind: DrafterKind, raw: Mapping[str, Any], path: str) -> None:
    """Refuse what a drafter without weights has no use for, and what is another's."""
    if "model" in raw:
        raise ValueError(f"speculative_config.{path}model: a {kind.name} drafter has no weights; leave it out")
    for native, own in (("prompt_lookup_min", "min_match"), ("prompt_lookup_max", "max_match")):
        if native in raw:
            raise ValueError(
                f"speculative_config.{path}{native} belongs to vLLM's own 'ngram'; here it is "
                f'"lookup": {{"{own}": {raw[native]!r}}}'
            )
    lookup = raw.get("lookup", {})
    if isinstance(lookup, Mapping) and "share" not in kind.lookup:
        for key in ("share", "cache_tokens"):
            if key in lookup:
                raise ValueError(
                    f"speculative_config.{path}lookup.{key}: a {kind.name} drafter looks into the request's own text "
                    "alone; leave it out, or use 'suffix'"
                )


def _check_keys(raw: Mapping[str, Any], known: Collection[str], path: str) -> None:
    for key in raw:
        if key not in known:
            raise ValueError(f"speculative_config: unknown key {path + key!r}{_hint(key, known, path)}")


def _hint(key: str, known: Collection[str], path: str) -> str:
    """The end of a sentence that refuses a key: where it belongs, or the nearest known one."""
    owners = [name for name, part in _PARTS.items() if key in part.model_fields]
    if len(owners) == 1:
        (part,) = owners
        within = "drafters.NAME." if "drafters" in known and part not in known else path
        if part in known or within != path:
            return f'; it belongs into {within + part!r}, as in "{part}": {{"{key}": ...}}'
    return nearest(key, known)


def _build(model: type[M], fields: dict[str, Any], path: str) -> M:
    try:
        return model(**fields)
    except ValidationError as error:
        # A mistyped key is named before the one that it leaves missing.
        first = next((e for e in error.errors() if e["type"] == "extra_forbidden"), error.errors()[0])
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            owner = _PARTS.get(str(first["loc"][0]))
            known = list(owner.model_fields) if owner else []
            raise ValueError(
                f"speculative_config: unknown key {path + where!r}{nearest(str(first['loc'][-1]), known)}"
            ) from None
        message = first["msg"][0].lower() + first["msg"][1:]
        if first["type"] == "model_type":
            message = "should be an object" if where in ("tree", "router") else "should be a path or an object"
        raise ValueError(f"speculative_config.{path}{where}: {message} (got {first['input']!r})") from None
