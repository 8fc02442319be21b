"""From our speculative config to vLLM's: checked against target and checkpoint, before any weight is loaded."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from vllm.config import SpeculativeConfig
from vllm.config.speculative import SpeculativeMethod

from vllm_crossspec import config as user_config
from vllm_crossspec.config import ADDITIONAL_CONFIG_KEY, CrossSpecConfig, DrafterConfig
from vllm_crossspec.drafters.base import drafter_kind
from vllm_crossspec.drafters.checkpoint import check_drafter
from vllm_crossspec.types import TargetFacts

V1_REFUSAL = "vllm_crossspec's proposers (set VLLM_USE_V2_MODEL_RUNNER=1 or leave it unset)"

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
    return raw is not None and user_config.is_ours(raw, native_methods())


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
    settings = user_config.parse(raw, native_keys())
    target = TargetFacts(
        name=str(target_model_config.model),
        hidden_size=target_model_config.get_hidden_size(),
        vocab_size=target_model_config.get_vocab_size(),
        num_layers=target_model_config.get_total_num_hidden_layers(),
    )
    settings = resolve(settings, target, has_weights=engine_args.load_format != "dummy")
    configs = drafter_configs(settings, target_model_config, target_parallel_config)
    engine_args.additional_config = {
        **(engine_args.additional_config or {}),
        ADDITIONAL_CONFIG_KEY: settings.model_dump(mode="json"),
    }
    from vllm_crossspec.metrics.export import prepare_frontend

    prepare_frontend()
    return next(iter(configs.values()))


def resolve(settings: CrossSpecConfig, target: TargetFacts, has_weights: bool = True) -> CrossSpecConfig:
    """Fill in what the checkpoints say: draft lengths and tapped layers, each checked against the target."""
    drafters = {}
    for name, drafter in settings.drafters.items():
        path = "speculative_config." + (f"drafters.{name}." if settings.method in user_config.META_METHODS else "")
        revision = drafter.native.get("revision")
        facts = check_drafter(drafter.kind, drafter.model, path + "model", target, revision, has_weights)
        wanted = drafter.num_speculative_tokens or settings.num_speculative_tokens
        limit = facts.max_draft_tokens
        if wanted is not None and limit is not None and wanted > limit:
            if drafter.num_speculative_tokens is None and settings.method in user_config.META_METHODS:
                wanted = limit  # the common bound is of the longest drafter; this one drafts what it can
            else:
                raise ValueError(
                    f"{path}num_speculative_tokens is {wanted}, but this drafter's block holds {limit} draft tokens; "
                    f"use {limit} or less"
                )
        drafters[name] = drafter.model_copy(
            update={
                "num_speculative_tokens": wanted or facts.default_draft_tokens,
                "target_layers": facts.target_layers,
                "model": str(Path(drafter.model).expanduser())
                if Path(drafter.model).expanduser().is_dir()
                else drafter.model,
            }
        )
    longest = max(d.num_speculative_tokens for d in drafters.values())
    return settings.model_copy(update={"drafters": drafters, "num_speculative_tokens": longest})


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

    The carrier plans for the longest draft and, DFlash needing the larger slot budget, is a DFlash drafter's
    config where there is one.
    """
    names = sorted(settings.drafters, key=lambda name: settings.drafters[name].kind != "dflash")
    configs = {}
    for index, name in enumerate(names):
        drafter = settings.drafters[name]
        tokens = settings.num_speculative_tokens if index == 0 else drafter.num_speculative_tokens
        configs[name] = SpeculativeConfig(
            **native_dict(drafter, tokens or 0),
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
    if len(settings.drafters) > 1 and speculative is not None:
        if speculative.draft_sample_method == "probabilistic":
            found.append("draft_sample_method 'probabilistic' with several drafters")
        if speculative.num_speculative_tokens_per_batch_size:
            found.append("num_speculative_tokens_per_batch_size with several drafters")
    return found
