"""From our speculative config to vLLM's: checked against target and checkpoint, before any weight is loaded."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from vllm.config import SpeculativeConfig
from vllm.config.speculative import SpeculativeMethod

from vllm_crossspec import config_parsing
from vllm_crossspec.adaptive.heterospec import load_policy
from vllm_crossspec.config import ADDITIONAL_CONFIG_KEY, META_METHODS, CrossSpecConfig, DrafterConfig, TreeConfig
from vllm_crossspec.drafters.base import drafter_kind
from vllm_crossspec.drafters.checkpoint import check_drafter
from vllm_crossspec.drafters.draft_model.checkpoint import check_follows
from vllm_crossspec.engine.checks import (
    check_calibrations,
    check_contemplation,
    check_ngram_stores,
    check_router_settings,
    check_target,
)
from vllm_crossspec.heads.flashhead.check import check_head
from vllm_crossspec.heads.flashhead.head import MAX_TOP_K
from vllm_crossspec.tree.base import tree_kind
from vllm_crossspec.tree.schedule import candidate_widths
from vllm_crossspec.types import TargetFacts

V1_REFUSAL = "vllm_crossspec's proposers (set VLLM_USE_V2_MODEL_RUNNER=1 or leave it unset)"

NGRAM_TOP_K = 25
"""Candidates at a position of trees that n-grams help to build, where the user names none (DART, appendix D)."""

# Set by vLLM itself when it builds the config; nobody writes them in JSON.
_INTERNAL_KEYS = {
    "target_model_config",
    "target_parallel_config",
    "draft_model_config",
    "draft_parallel_config",
}


def native_methods() -> set[str]:
    """Every method name that vLLM knows."""
    return {name for part in get_args(SpeculativeMethod) for name in (get_args(part) or (part,))}


def native_keys() -> set[str]:
    """Every key that vLLM's own speculative config takes."""
    return {f.name for f in dataclasses.fields(SpeculativeConfig)} - _INTERNAL_KEYS


def _raw(engine_args: Any) -> Mapping[str, Any] | None:
    raw = engine_args.speculative_config
    if not isinstance(raw, Mapping):
        return None
    raw = {k.replace("-", "_"): v for k, v in raw.items() if k not in _INTERNAL_KEYS}
    for key, value in (
        ("method", engine_args.spec_method),
        ("model", engine_args.spec_model),
        ("num_speculative_tokens", engine_args.spec_tokens),
    ):
        if value is not None and key not in raw:
            raw[key] = value
    return raw


def is_ours(engine_args: Any) -> bool:
    """Whether these engine arguments ask for our proposers; raises for a method that nobody knows."""
    raw = _raw(engine_args)
    return raw is not None and config_parsing.is_ours(raw, native_methods(), native_keys())


def settings_of(vllm_config: Any) -> CrossSpecConfig | None:
    """Our resolved settings, as they ride in ``additional_config``; None where there are none."""
    additional = getattr(vllm_config, "additional_config", None)
    if not isinstance(additional, Mapping) or ADDITIONAL_CONFIG_KEY not in additional:
        return None
    return CrossSpecConfig(**additional[ADDITIONAL_CONFIG_KEY])


def build(engine_args: Any, target_model_config: Any, target_parallel_config: Any) -> SpeculativeConfig:
    """Validate, resolve and translate; our settings go to the workers through ``additional_config``.

    Raises:
        ValueError: one sentence naming the key and the fix.
    """
    raw = _raw(engine_args)
    assert raw is not None
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        raise ValueError(
            f"speculative_config.method {raw['method']!r} with our keys needs vLLM's V2 model runner; "
            "unset VLLM_USE_V2_MODEL_RUNNER (V1 is deprecated)"
        )
    settings = config_parsing.parse(raw, native_keys())
    target = TargetFacts(
        name=str(target_model_config.model),
        hidden_size=target_model_config.get_hidden_size(),
        vocab_size=target_model_config.get_vocab_size(),
        num_layers=target_model_config.get_total_num_hidden_layers(),
    )
    settings = resolve(settings, target, has_weights=engine_args.load_format != "dummy")
    check_ngram_stores(settings, target, target_model_config)
    check_calibrations(settings, target_model_config)
    check_contemplation(settings, target_model_config)
    settings = resolve_extensions(settings)
    settings = resolve_schedules(settings, can_measure=can_measure(target_parallel_config))
    check_target(settings, target_model_config)
    check_router_settings(settings, target)
    configs = drafter_configs(settings, target_model_config, target_parallel_config)
    for name, config in configs.items():
        if config.uses_draft_model():
            path = "speculative_config." + (f"drafters.{name}." if settings.method in META_METHODS else "")
            check_follows(config, target_model_config, target_parallel_config, path)
    if settings.verification == "match":
        _use_our_worker(target_parallel_config)
    engine_args.additional_config = {
        **(engine_args.additional_config or {}),
        ADDITIONAL_CONFIG_KEY: settings.model_dump(mode="json"),
    }
    from vllm_crossspec.metrics.export import prepare_frontend

    prepare_frontend()
    return next(iter(configs.values()))


def resolve_extensions(settings: CrossSpecConfig) -> CrossSpecConfig:
    """Fill in how many levels adaptive trees may grow at most, as their calibrations say."""
    drafters = {}
    for name, drafter in settings.drafters.items():
        if drafter.adaptive is not None:
            policy = load_policy(drafter.adaptive, drafter.tree.num_nodes or 1)
            adaptive = drafter.adaptive.model_copy(update={"max_extension": policy.max_extension})
            drafter = drafter.model_copy(update={"adaptive": adaptive})
        drafters[name] = drafter
    return settings.model_copy(update={"drafters": drafters})


def _use_our_worker(parallel_config: Any) -> None:
    """Have vLLM load the worker whose runner verifies by sample-and-match."""
    from vllm.platforms import current_platform

    from vllm_crossspec.engine.worker import CPU_WORKER, GPU_WORKER

    if parallel_config.worker_cls not in ("auto", CPU_WORKER, GPU_WORKER):
        raise ValueError(
            f"--worker-cls {parallel_config.worker_cls} and speculative_config.verification 'match' exclude each "
            "other: leave out --worker-cls, or use verification 'rejection' (chains only)"
        )
    parallel_config.worker_cls = CPU_WORKER if current_platform.is_cpu() else GPU_WORKER


def resolve(settings: CrossSpecConfig, target: TargetFacts, has_weights: bool = True) -> CrossSpecConfig:
    """Fill in what the checkpoints say: draft lengths and tapped layers, each checked against the target."""
    drafters = {}
    for name, drafter in settings.drafters.items():
        path = "speculative_config." + (f"drafters.{name}." if settings.method in META_METHODS else "")
        revision = drafter.native.get("revision")
        facts = check_drafter(drafter.kind, drafter.model, path + "model", target, revision, has_weights)
        tree = resolve_tree(drafter)
        check_head(drafter.model_copy(update={"tree": tree}), facts, path + "head")
        wanted = tree.depth or drafter.num_speculative_tokens or settings.num_speculative_tokens
        limit = facts.max_draft_tokens
        if wanted is not None and limit is not None and wanted > limit:
            if drafter.num_speculative_tokens is None and settings.method in META_METHODS:
                wanted = limit  # the common bound is of the longest drafter; this one drafts what it can
            else:
                raise ValueError(
                    f"{path}num_speculative_tokens is {wanted}, but this drafter's block holds {limit} draft tokens; "
                    f"use {limit} or less"
                )
        num_tokens = wanted or facts.default_draft_tokens
        if tree.is_chain and drafter_kind(drafter.kind, "").contemplates:
            # The rows of a chain are the rows of a tree in which every node has one child.
            tree = tree.model_copy(update={"type": "dynamic", "depth": num_tokens, "top_k": 1, "num_nodes": num_tokens})
        folder = Path(drafter.model).expanduser()
        drafters[name] = drafter.model_copy(
            update={
                "num_speculative_tokens": num_tokens,
                "target_layers": facts.target_layers,
                "model": str(folder) if folder.is_dir() else drafter.model,
                "tree": tree,
            }
        )
    longest = max(d.tree.num_nodes or d.num_speculative_tokens for d in drafters.values())
    return settings.model_copy(update={"drafters": drafters, "num_speculative_tokens": longest})


def resolve_tree(drafter: DrafterConfig) -> TreeConfig:
    """The tree with every size that the user left out; a chain stays as it is."""
    if drafter.tree.is_chain:
        return drafter.tree
    given = {k: v for k, v in drafter.tree.model_dump().items() if v is not None}
    if drafter.tree.type == "dynamic" and drafter.num_speculative_tokens is not None:
        given.setdefault("depth", drafter.num_speculative_tokens)
    defaults = dict(tree_kind(drafter.tree.type, "tree.type").defaults)
    if drafter.ngram is not None:
        defaults.setdefault("top_k", NGRAM_TOP_K)
    tree = drafter.tree.model_copy(update={**defaults, **given})
    if tree.top_k is None:  # the likeliest prefixes can all end at one position
        most = 255 if drafter.head is None else MAX_TOP_K
        tree = tree.model_copy(update={"top_k": min(tree.num_nodes or most, most)})
    return tree


def can_measure(parallel_config: Any) -> bool:
    """Whether start-up can time steps: a CPU's mean nothing, and vLLM has no schedules with data parallelism."""
    from vllm.platforms import current_platform

    return not current_platform.is_cpu() and parallel_config.data_parallel_size == 1


def resolve_schedules(settings: CrossSpecConfig, can_measure: bool) -> CrossSpecConfig:
    """Trees without a schedule get "auto"; none stays "auto" where nothing is measured or a drafter has its own."""
    if settings.router is not None and settings.router.policy == "record":  # drafts are kept, and none is verified
        return settings.model_copy(
            update={
                "drafters": {
                    name: d.model_copy(update={"tree": d.tree.model_copy(update={"by_batch_size": {1: 0}})})
                    for name, d in settings.drafters.items()
                }
            }
        )
    given = [d.tree.by_batch_size for d in settings.drafters.values()]
    is_auto = can_measure and not any(isinstance(schedule, dict) for schedule in given)
    drafters = {}
    for name, drafter in settings.drafters.items():
        schedule = drafter.tree.by_batch_size
        if schedule == "auto" or (schedule is None and not drafter.tree.is_chain):
            tree = drafter.tree.model_copy(update={"by_batch_size": "auto" if is_auto else None})
            drafter = drafter.model_copy(update={"tree": tree})
        drafters[name] = drafter
    return settings.model_copy(update={"drafters": drafters})


def draft_widths(settings: CrossSpecConfig) -> tuple[int, ...]:
    """The draft lengths from which a measured schedule is chosen, falling to 0."""
    assert settings.num_speculative_tokens is not None
    depth = settings.drafters[settings.active].num_speculative_tokens
    return candidate_widths(settings.num_speculative_tokens, depth or 1)


def draft_schedule(settings: CrossSpecConfig) -> list[tuple[int, int, int]] | None:
    """vLLM's own form of ``tree.by_batch_size``: (from, to, draft tokens); None where no drafter has one.

    Nodes are ordered by falling path probability, so the first ones are the best subtree of their number.
    """
    if settings.measures_load:  # until it is measured, every width once: vLLM captures graphs for what it finds here
        widths = [settings.planned(width) for width in draft_widths(settings)]
        return [(i, i, width) for i, width in enumerate(widths[:-1], start=1)] + [(len(widths), 1 << 20, widths[-1])]
    given = (d.tree.by_batch_size for d in settings.drafters.values())
    schedules = [schedule for schedule in given if isinstance(schedule, dict)]
    if not schedules:
        return None
    starts = sorted(set().union(*schedules))
    sizes = [settings.planned(max(s[max(k for k in s if k <= start)] for s in schedules)) for start in starts]
    ends = [*(start - 1 for start in starts[1:]), 1 << 20]
    return list(zip(starts, ends, sizes, strict=True))


def native_dict(drafter: DrafterConfig, num_speculative_tokens: int) -> dict[str, Any]:
    """The speculative config that vLLM itself would take for this drafter alone."""
    return {
        "method": drafter_kind(drafter.kind, "method").carrier,
        "model": drafter.model,
        "num_speculative_tokens": num_speculative_tokens,
        **drafter.native,
    }


def drafter_configs(
    settings: CrossSpecConfig, target_model_config: Any, target_parallel_config: Any
) -> dict[str, SpeculativeConfig]:
    """vLLM's own config for every drafter, by name; the first carries the engine.

    The carrier plans for the longest draft and, block drafters needing the larger slot budget, is one's config where
    there is one.
    """
    carriers = {name: drafter_kind(d.kind, "method").carrier for name, d in settings.drafters.items()}
    names = sorted(settings.drafters, key=lambda name: carriers[name] != "dflash")
    schedule, method = draft_schedule(settings), settings.draft_sample_method
    common = {} if method in (None, "coupled") else {"draft_sample_method": method}
    configs = {}
    for index, name in enumerate(names):
        drafter = settings.drafters[name]
        assert settings.num_speculative_tokens is not None
        planned = settings.planned(settings.num_speculative_tokens)
        tokens = planned if index == 0 else drafter.num_speculative_tokens
        extra = {"num_speculative_tokens_per_batch_size": schedule} if index == 0 and schedule else {}
        configs[name] = SpeculativeConfig(
            **native_dict(drafter, tokens or 0),
            **common,
            **extra,
            target_model_config=target_model_config,
            target_parallel_config=target_parallel_config,
        )
    return configs


def unsupported_features(vllm_config: Any) -> list[str]:
    """What our proposers do not do, in words that vLLM's own message ends with."""
    settings = settings_of(vllm_config)
    if settings is None:
        return []
    parallel = vllm_config.parallel_config
    found = []
    if parallel.pipeline_parallel_size > 1:
        found.append("pipeline parallelism with vllm_crossspec (use tensor parallelism)")
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        found.append("context parallelism with vllm_crossspec")
    if parallel.use_ubatching:
        found.append("micro-batching (DBO) with vllm_crossspec")
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.enable_adaptive_verification:
        found.append("enable_adaptive_verification with vllm_crossspec")
    if any(d.head is not None for d in settings.drafters.values()) and parallel.tensor_parallel_size > 1:
        found.append("tensor parallelism with a FlashHead, whose output layer would be sharded (leave out head)")
    if settings.adapts and parallel.data_parallel_size > 1:
        found.append("data parallelism with adaptive trees (ranks would draft apart)")
    if settings.routes and parallel.data_parallel_size > 1:
        found.append("data parallelism with several drafters of vllm_crossspec (ranks would draft apart)")
    if len(settings.drafters) > 1 and speculative is not None:
        if speculative.draft_sample_method == "probabilistic":
            found.append("draft_sample_method 'probabilistic' with several drafters")
        if settings.verification == "rejection" and speculative.num_speculative_tokens_per_batch_size:
            found.append("num_speculative_tokens_per_batch_size with several drafters and verification 'rejection'")
    if settings.verification == "match":
        found.extend(_unsupported_by_match(vllm_config))
    if settings.has_trees:
        found.extend(_unsupported_by_trees(vllm_config))
    return found


def _unsupported_by_match(vllm_config: Any) -> list[str]:
    """What sample-and-match does not do yet; vLLM's rejection sampler does."""
    found = []
    if vllm_config.watermark_config is not None:
        found.append("watermarking with verification 'match' of vllm_crossspec (use 'rejection')")
    if vllm_config.parallel_config.enable_batch_sharded_sampling:
        found.append("batch-sharded sampling with verification 'match' of vllm_crossspec (use 'rejection')")
    if vllm_config.model_config.return_sampling_mask or vllm_config.model_config.enable_trace_replay:
        found.append("sampling masks and trace replay with verification 'match' of vllm_crossspec (use 'rejection')")
    return found


def _unsupported_by_trees(vllm_config: Any) -> list[str]:
    """What draft trees do not do; chains do."""
    found = []
    if vllm_config.kv_transfer_config is not None:
        found.append("KV connectors with draft trees (layers are saved before the accepted path is in place)")
    if vllm_config.cache_config.cache_dtype not in ("auto", "bfloat16", "float16", "float32"):
        found.append(
            f"a KV cache in {vllm_config.cache_config.cache_dtype} with draft trees (use --kv-cache-dtype auto)"
        )
    return found
