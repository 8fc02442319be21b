"""Reading ``--speculative-config``: checked before anything is loaded, and one sentence for what is wrong.

A dictionary is ours when its method is ours alone (``whiflash``, and drafters that vLLM does not know). A drafter that
vLLM knows, too, is ours with any of our keys (``tree``, ``head``, ``verification``), or where vLLM cannot run it.
Everything else is vLLM's own and stays untouched. A mistake is a ValueError with the key and what it should be.
"""

import importlib.util
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from vllm_crossspec.config.native_keys import SCHEDULE_KEY, check_native, with_schedule
from vllm_crossspec.config.schema import (
    META_METHODS,
    AdaptiveConfig,
    CrossSpecConfig,
    DrafterConfig,
    HeadConfig,
    LookupConfig,
    NgramConfig,
    RouterConfig,
)
from vllm_crossspec.kinds.drafter import DrafterKind, drafter_kind, drafter_kinds
from vllm_crossspec.kinds.policy import PolicyKind
from vllm_crossspec.kinds.settings import MAX_DEPTH, Settings
from vllm_crossspec.kinds.tree import KINDS, TreeConfig, takers, tree_kind, tree_kinds
from vllm_crossspec.names import counted, nearest

OUR_KEYS = ("tree", "ngram", "head", "adaptive", "lookup", "dtype", "verification", "drafters", "router")
_TOP_KEYS = ("verification", "draft_sample_method")
_FORM_KEYS = ("tree", "num_speculative_tokens", "ngram", "adaptive", SCHEDULE_KEY)
"""What a drafter that uses another's weights says itself."""
_MODELS: dict[str, type[Settings]] = {
    "ngram": NgramConfig, "head": HeadConfig, "adaptive": AdaptiveConfig, "lookup": LookupConfig,
    "router": RouterConfig,
}  # fmt: skip
_PARTS = {
    "tree": [setting for kind in KINDS.values() for setting in kind.settings.model_fields],
    **{name: list(model.model_fields) for name, model in _MODELS.items()},
}

M = TypeVar("M", bound=Settings)


def is_ours(raw: Mapping[str, Any], native_methods: Collection[str], native_keys: Collection[str]) -> bool:
    """Whether a speculative config is for our proposers; methods and keys that are vLLM's own are ``native``."""
    method = raw.get("method")
    if method is not None and not isinstance(method, str):
        raise ValueError(f"speculative_config.method is {method!r}; give the name of a method")
    own = {*META_METHODS, *drafter_kinds()} - {*native_methods}
    if method in own:
        return True
    if method is not None and method not in native_methods:
        known = sorted({*native_methods, *own})
        raise ValueError(f"speculative_config: unknown method {method!r}{nearest(str(method), known)}")
    if method in drafter_kinds() and (any(key in raw for key in OUR_KEYS) or missing_package(method)):
        return True
    # What vLLM would call an unexpected keyword may be a key of ours, mistyped or out of place.
    for key in (key for key in raw if key not in native_keys):
        if method in drafter_kinds():
            raise ValueError(f"speculative_config: unknown key {key!r}{_hint(key, {*native_keys, *OUR_KEYS}, '')}")
        if key in OUR_KEYS:
            methods = sorted({*META_METHODS, *drafter_kinds()})
            fix = f"method {method!r} has none" if method else 'the "method" is missing'
            raise ValueError(f"speculative_config.{key} is for the methods {', '.join(methods)}; {fix}")
    return False


def missing_package(method: str) -> str | None:
    """The package that vLLM's own method of a drafter's name needs, if it is not installed; else None."""
    package = drafter_kind(method, "speculative_config.method").vllm_needs
    return package if package and importlib.util.find_spec(package) is None else None


def parse(raw: Mapping[str, Any], native_keys: Collection[str]) -> CrossSpecConfig:
    """Check the user's dictionary and give it its types; ``native_keys`` are handed through to vLLM."""
    method = raw["method"]
    if method in META_METHODS:
        return _parse_meta(raw, native_keys)
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


def _check(config: CrossSpecConfig) -> CrossSpecConfig:
    """Refuse what does not go together, as far as it can be seen without the checkpoints."""
    for name, drafter in config.drafters.items():
        path = config.path_of(name)
        kind = drafter.traits
        if not kind.can_share and len(config.drafters) > 1:
            raise ValueError(
                f"speculative_config.drafters.{name}: a {kind.name} drafter reads no states of the target, so that it "
                f"cannot catch up beside others; use it alone, as method {kind.name!r}"
            )
        _check_tree(config, drafter, path)
        _check_parts(drafter, kind, path)
        _check_verification(config, drafter, kind, path)
        check_native(config, drafter, kind, path)
    futures = [name for name, drafter in config.drafters.items() if drafter.traits.contemplates]
    if len(futures) > 1:  # the target runs one set of contemplate rows in a step
        raise ValueError(
            f"speculative_config.drafters: {' and '.join(futures)} would both have the target contemplate for them; "
            f"use one {config.drafters[futures[0]].kind} drafter"
        )
    if futures and config.verification != "match":
        raise ValueError(
            "speculative_config.verification 'rejection' knows no contemplate rows; leave it out for a "
            f"{config.drafters[futures[0]].kind} drafter"
        )
    method, wanted = config.draft_sample_method, {"coupled": "match", "probabilistic": "rejection"}
    if method in wanted and config.verification != wanted[method]:
        raise ValueError(
            f"speculative_config.draft_sample_method {method!r} needs verification {wanted[method]!r}, "
            f"which is {config.verification!r}"
        )
    return config


def _check_tree(config: CrossSpecConfig, drafter: DrafterConfig, path: str) -> None:
    """Refuse trees of settings that do not go together, and more levels than a tree has, given as draft tokens."""
    tree, tokens = drafter.tree, drafter.num_speculative_tokens
    tree.check(path + "tree", has_ngrams=drafter.ngram is not None)
    takes_depth = "depth" in tree_kind(tree.type, path + "tree.type").takes
    if tree.is_chain and drafter.traits.contemplates:  # verified as a tree of one branch
        tokens, takes_depth = tokens or config.num_speculative_tokens, True
    if takes_depth and tree.depth is None and (tokens or 0) > MAX_DEPTH:
        raise ValueError(
            f"{path}num_speculative_tokens is {tokens}, and this drafter's drafts are at most {MAX_DEPTH} levels deep; "
            f"use {MAX_DEPTH} or less"
        )
    schedule = tree.by_batch_size
    if isinstance(schedule, dict) and (min(schedule, default=0) != 1 or not set(schedule.values()) <= {*range(256)}):
        raise ValueError(
            f"{path}tree.by_batch_size must say from 1 running request on how many tokens (0 to 255) to draft, "
            'as in {"1": 60, "16": 0}'
        )
    if tree.budget == "batch":
        reasons = {
            'a chain, whose tokens have no chances to compare (a tree with "top_k": 1 has them)': tree.is_chain,
            "one of several drafters, for whose missed tokens the host must know every row": len(config.drafters) > 1,
            f"a {drafter.traits.name} drafter, whose rows come in pairs": drafter.traits.contemplates,
            'draft lengths that you chose; set by_batch_size to "auto", or leave it out': isinstance(schedule, dict),
        }
        for reason in (reason for reason, is_so in reasons.items() if is_so):
            fix = "" if isinstance(schedule, dict) else "; leave it out"
            raise ValueError(f"{path}tree.budget 'batch' is not for {reason}{fix}")


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
        key, given = path + "adaptive", drafter.adaptive
        if given.type == "heterospec" and given.model is None:
            raise ValueError(f"{key}.model is missing; give the file that `crossspec calibrate heterospec` wrote")
        if drafter.records_trees and (given.model is not None or given.max_extension is not None):
            raise ValueError(f"{key}: type 'record' takes neither model nor max_extension; leave them out")
    if drafter.ngram is not None and "ngram_weight" not in tree_kind(tree.type, path + "tree.type").takes:
        raise ValueError(
            f"{path}ngram helps {' and '.join(map(repr, takers('ngram_weight')))} trees, and this drafter drafts "
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


def _tree(raw: Any, kind: DrafterKind, key: str) -> TreeConfig:
    """A drafter's tree; refuses one that it cannot feed, and settings that this kind of tree does not have."""
    if not isinstance(raw, Mapping):
        raise ValueError(f"{key}: should be an object (got {raw!r})")
    if "type" not in raw and (kind.drafts_trees or raw.keys() - {"by_batch_size", "budget"}):
        raw = {"type": kind.tree, **raw}
    name = raw.get("type", "chain")
    if name not in tree_kinds():
        *others, last = map(repr, tree_kinds())
        raise ValueError(f"{key}.type: input should be {', '.join(others)} or {last} (got {name!r})")
    tree, fields = tree_kind(name, f"{key}.type"), {}
    if name != "chain" and tree.needs != kind.supplies:
        fix = "it drafts chains alone: leave out the tree" if kind.tree == "chain" else f"use {kind.tree!r} or 'chain'"
        raise ValueError(f"{key}.type {name!r} does not suit a {kind.name} drafter; {fix}")
    for setting, value in raw.items():
        if setting in tree.takes or not takers(setting):
            fields[setting] = value
        elif value is not None:
            tree.refuse(setting, key)
    return _build(tree.settings, fields, key.removeprefix("speculative_config.") + ".")


def _parse_meta(raw: Mapping[str, Any], native_keys: Collection[str]) -> CrossSpecConfig:
    known = ("method", "num_speculative_tokens", "drafters", "router", *_TOP_KEYS)
    for key in raw:
        if key in native_keys and key not in known:
            raise ValueError(f"speculative_config.{key} belongs into a drafter, as drafters.NAME.{key}")
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
    policy, kind = router.policy, router.kind
    if router.drafter is not None and not kind.is_fixed:
        raise ValueError(f"{key}.drafter belongs to policy 'fixed', not to {policy!r}; leave out one of the two")
    if config.active not in config.drafters:
        raise ValueError(
            f"{key}.drafter is {config.active!r}, which is none of drafters{nearest(config.active, config.drafters)}"
        )
    if kind.is_fixed:
        has_own = router.model is not None or router.costs is not None or bool(router.by_category)
        if has_own or router.threshold != "auto" or not router.wait:
            raise ValueError(f"{key}: policy 'fixed' takes neither model, thresholds, costs nor wait; leave them out")
        return
    if len(config.drafters) < 2:
        raise ValueError(f"{key}.policy {policy!r} chooses between drafters, and there is one; add another to drafters")
    if config.verification != "match":
        raise ValueError(f"{key}.policy {policy!r} needs verification 'match'; leave out verification")
    if kind.needs_checkpoint and router.model is None:
        raise ValueError(
            f"{key}.model is missing: policy {policy!r} needs a router trained by `crossspec train router`"
        )
    learns, predicts = kind.learns and router.model is None, kind.needs_hidden and router.model is not None
    if "explore" in router.model_fields_set and not learns:
        raise ValueError(f"{key}.explore is for policy 'goodput' without a model; leave it out")
    if not router.wait and not learns:
        raise ValueError(f"{key}.wait: false is for policy 'goodput' without a model; leave it out")
    if "correct" in router.model_fields_set and not predicts:
        raise ValueError(
            f"{key}.correct is for a trained router: policy 'neural', or 'goodput' with model; leave it out"
        )
    if router.entropy_of == "sampling" and not (kind.needs_logits or learns):
        raise ValueError(f"{key}.entropy_of is for policy 'entropy', or 'goodput' without a model; leave it out")
    given = {f"by_category.{name}": numbers for name, numbers in router.by_category.items()}
    if router.threshold != "auto":
        given["threshold"] = router.threshold
    if given and not kind.takes_threshold:
        raise ValueError(f"{key}.{next(iter(given))}: policy {policy!r} takes no thresholds; leave it out")
    for name, numbers in given.items():
        _check_thresholds(kind, numbers, len(config.drafters) - 1, f"{key}.{name}")


def _check_thresholds(kind: PolicyKind, numbers: tuple[float, ...], wanted: int, key: str) -> None:
    if len(numbers) != wanted:
        raise ValueError(f"{key} has {counted(len(numbers), 'number')}; {wanted + 1} drafters need {wanted}")
    if kind.needs_logits and (min(numbers) < 0 or list(numbers) != sorted(numbers, reverse=True)):
        raise ValueError(f"{key} must be nats of 0 or more, falling from drafter to drafter (got {numbers})")
    if kind.needs_hidden and not all(abs(number) <= 255 for number in numbers):
        raise ValueError(f"{key} must be tokens between -255 and 255 (got {numbers})")


def _drafter(kind: str, raw: Mapping[str, Any], path: str, native_keys: Collection[str]) -> DrafterConfig:
    own_kind = drafter_kind(kind, f"speculative_config.{path}type")
    ours = ("model", "num_speculative_tokens", "tree", "ngram", "head", "adaptive", "lookup", "dtype")
    native = [k for k in native_keys if k not in ("method", *_TOP_KEYS, *ours)]
    _check_keys(raw, (*ours, *native), path)
    raw = with_schedule(raw, path)
    fields = {k: raw[k] for k in ours if k in raw}
    if not own_kind.has_model:
        _check_without_model(own_kind, raw, path)
        fields["model"] = ""
        if own_kind.lookup and isinstance(lookup := fields.get("lookup", {}), Mapping):
            fields["lookup"] = {**own_kind.lookup, **lookup}
    elif not raw.get("model"):
        raise ValueError(f"speculative_config.{path}model is missing; give the drafter's folder or hub id")
    if "tree" in fields or own_kind.drafts_trees:
        fields["tree"] = _tree(fields.get("tree", {}), own_kind, f"speculative_config.{path}tree")
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
    owners = [name for name, part in _PARTS.items() if key in part]
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
            known = _PARTS.get(str(first["loc"][0]), list(model.model_fields))
            raise ValueError(
                f"speculative_config: unknown key {path + where!r}{nearest(str(first['loc'][-1]), known)}"
            ) from None
        message = first["msg"][0].lower() + first["msg"][1:]
        if first["type"] == "model_type":
            message = "should be an object" if where == "router" else "should be a path or an object"
        raise ValueError(f"speculative_config.{path}{where}: {message} (got {first['input']!r})") from None
