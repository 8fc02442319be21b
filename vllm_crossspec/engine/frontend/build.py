"""From our speculative config to vLLM's: checked against target and checkpoint, before any weight is loaded."""

import os
from collections.abc import Mapping
from typing import Any

from vllm.config import SpeculativeConfig

from vllm_crossspec import config_parsing
from vllm_crossspec.config import ADDITIONAL_CONFIG_KEY
from vllm_crossspec.drafters.base import drafter_kind, load
from vllm_crossspec.engine.frontend.refuse import (
    check_calibrations,
    check_drafted_targets,
    check_ngram_stores,
    check_router_settings,
    check_target,
)
from vllm_crossspec.engine.frontend.resolve import resolve, resolve_extensions
from vllm_crossspec.engine.frontend.schedule import can_measure, resolve_schedules
from vllm_crossspec.engine.names import CPU_WORKER, GPU_WORKER
from vllm_crossspec.engine.vllm_api.speculative import _INTERNAL_KEYS, drafter_configs, native_keys, native_methods
from vllm_crossspec.types import TargetFacts


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
    settings = config_parsing.parse(raw, native_keys()).without_idle()
    target = TargetFacts(
        name=str(target_model_config.model),
        hidden_size=target_model_config.get_hidden_size(),
        vocab_size=target_model_config.get_vocab_size(),
        num_layers=target_model_config.get_total_num_hidden_layers(),
    )
    settings = resolve(settings, target, has_weights=engine_args.load_format != "dummy")
    check_ngram_stores(settings, target, target_model_config)
    check_calibrations(settings, target_model_config)
    check_drafted_targets(settings, target_model_config)
    settings = resolve_extensions(settings)
    settings = resolve_schedules(settings, can_measure=can_measure(target_parallel_config))
    check_target(settings, target_model_config)
    check_router_settings(settings, target)
    if target_model_config.use_mla:
        _wait_for_every_step(engine_args)
    configs = drafter_configs(settings, target_model_config, target_parallel_config)
    for name, config in configs.items():
        kind = drafter_kind(settings.drafters[name].kind, "method")
        if kind.check_engine:
            check = load(kind.check_engine)
            check(config, target_model_config, target_parallel_config, settings.path_of(name))
    if settings.verification == "match":
        _use_our_worker(target_parallel_config)
    engine_args.additional_config = {
        **(engine_args.additional_config or {}),
        ADDITIONAL_CONFIG_KEY: settings.model_dump(mode="json"),
    }
    from vllm_crossspec.metrics.export import prepare_frontend

    prepare_frontend()
    return next(iter(configs.values()))


def _wait_for_every_step(engine_args: Any) -> None:
    """Have the host know how long every context is, of which latent attention (MLA) is told by the host.

    Requests with fewer rows than others, and all of them under some of its backends, are computed as prompts are, over
    a context whose length the scheduler knows. Asynchronously it counts drafts that were refused since.
    """
    if engine_args.async_scheduling:
        raise ValueError(
            "async_scheduling with latent attention (MLA) and speculation would take refused drafts for context; "
            "leave it out, or use --no-async-scheduling"
        )
    engine_args.async_scheduling = False


def _use_our_worker(parallel_config: Any) -> None:
    """Have vLLM load the worker whose runner verifies by sample-and-match."""
    from vllm.platforms import current_platform

    if parallel_config.worker_cls not in ("auto", CPU_WORKER, GPU_WORKER):
        raise ValueError(
            f"--worker-cls {parallel_config.worker_cls} and speculative_config.verification 'match' exclude each "
            "other: leave out --worker-cls, or use verification 'rejection' (chains only)"
        )
    parallel_config.worker_cls = CPU_WORKER if current_platform.is_cpu() else GPU_WORKER
