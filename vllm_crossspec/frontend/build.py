"""From our speculative config to vLLM's: checked against target and checkpoint, before any weight is loaded.

What is wrong is a ValueError of one sentence, which names the key and the fix.
"""

import os
from collections.abc import Mapping
from typing import Any

from vllm.config import SpeculativeConfig
from vllm.logger import init_logger

from vllm_crossspec.config import parse as config_parsing
from vllm_crossspec.config.schema import CrossSpecConfig, carried
from vllm_crossspec.config.summary import summary
from vllm_crossspec.frontend import precheck
from vllm_crossspec.frontend.refuse import check_target
from vllm_crossspec.frontend.resolve import resolve_schedules, with_files
from vllm_crossspec.kinds.registry import load
from vllm_crossspec.load.schedule import can_measure
from vllm_crossspec.platform import platform
from vllm_crossspec.types import TargetFacts
from vllm_crossspec.vllm_api.speculative import drafter_configs

logger = init_logger("vllm.crossspec")


def asked(engine_args: Any) -> CrossSpecConfig | None:
    """What these engine arguments, JSON and flags, ask of our proposers; None where they ask for none or vLLM's own."""
    given = engine_args.speculative_config
    if not isinstance(given, Mapping):
        return None
    raw = precheck.as_written(given)
    for flag, key, value in (
        ("--spec-method", "method", engine_args.spec_method),
        ("--spec-model", "model", engine_args.spec_model),
        ("--spec-tokens", "num_speculative_tokens", engine_args.spec_tokens),
    ):
        if value is not None and raw.setdefault(key, value) != value:
            raise ValueError(f"{flag} {value} and speculative_config.{key} {raw[key]!r} differ; leave out one of them")
    return precheck.parse(raw)


def check_first(engine_args: Any) -> None:
    """Refuse a machine without what engines need, wrong keys and names of models that are none.

    Before vLLM reads or asks for any model.
    """
    settings = asked(engine_args)
    if settings is None:
        return
    if problem := platform().problem():
        raise ValueError(problem)
    is_by_name = engine_args.load_format == "auto" and engine_args.hf_config_path is None
    precheck.check_folders(settings, engine_args.model if is_by_name else None, engine_args.revision)


def build(
    engine_args: Any, settings: CrossSpecConfig, target_model_config: Any, target_parallel_config: Any
) -> SpeculativeConfig:
    """Resolve and translate; our settings go to the workers through ``additional_config``."""
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        raise ValueError(
            f"speculative_config.method {settings.method!r} with our keys needs vLLM's V2 model runner; "
            "unset VLLM_USE_V2_MODEL_RUNNER (V1 is deprecated)"
        )
    target = TargetFacts(
        name=str(target_model_config.model),
        hidden_size=target_model_config.get_hidden_size(),
        vocab_size=target_model_config.get_vocab_size(),
        num_layers=target_model_config.get_total_num_hidden_layers(),
    )
    settings = with_files(settings, target, target_model_config, has_weights=engine_args.load_format != "dummy")
    settings = resolve_schedules(settings, can_measure=can_measure(target_parallel_config))
    check_target(settings, target_model_config)
    if target_model_config.use_mla:
        _wait_for_every_step(engine_args)
    configs = drafter_configs(settings, target_model_config, target_parallel_config)
    for name, config in configs.items():
        if check := settings.drafters[name].traits.check_engine:
            load(check)(config, target_model_config, target_parallel_config, settings.path_of(name))
    if settings.verification == "match":
        _use_our_worker(target_parallel_config)
    engine_args.additional_config = {**(engine_args.additional_config or {}), **carried(settings)}
    from vllm_crossspec.metrics.export import prepare_frontend

    prepare_frontend()
    carrier = next(iter(configs.values()))
    _say_what_runs(engine_args, settings, carrier.method)
    return carrier


def _say_what_runs(engine_args: Any, settings: CrossSpecConfig, carrier: str) -> None:
    """In vLLM's log, whose own lines name only the method that carries the engine.

    A config without any key of ours is ours where the package is missing that vLLM's own method needs.
    """
    if not any(key in precheck.as_written(engine_args.speculative_config) for key in config_parsing.OUR_KEYS) and (
        package := config_parsing.missing_package(settings.method)
    ):
        logger.info("crossspec: vLLM's own '%s' needs %s, which is not installed; ours runs", settings.method, package)
    note = "" if carrier == settings.method else f" (vLLM's log calls it method='{carrier}')"
    logger.info("crossspec: %s%s", "; ".join(summary(settings)), note)


def _wait_for_every_step(engine_args: Any) -> None:
    """Have the host know how long every context is: latent attention (MLA) is told by the host.

    It computes some requests as prompts, over a context of the scheduler's length. Under asynchronous scheduling that
    includes drafts which were refused since.
    """
    if engine_args.async_scheduling:
        raise ValueError(
            "async_scheduling with latent attention (MLA) and speculation would take refused drafts for context; "
            "leave it out, or use --no-async-scheduling"
        )
    engine_args.async_scheduling = False


def _use_our_worker(parallel_config: Any) -> None:
    """Have vLLM load the worker whose runner verifies by sample-and-match."""
    worker = platform().worker
    if parallel_config.worker_cls not in ("auto", worker):
        raise ValueError(
            f"--worker-cls {parallel_config.worker_cls} and speculative_config.verification 'match' exclude each "
            "other: leave out --worker-cls, or use verification 'rejection' (chains only)"
        )
    parallel_config.worker_cls = worker
