"""vLLM's own speculative configs of our drafters: what carries each of them through the engine."""

import copy
import dataclasses
from typing import Any, get_args

from vllm.config import SpeculativeConfig, VllmConfig
from vllm.config.speculative import SpeculativeMethod

from vllm_crossspec.config import CrossSpecConfig, DrafterConfig
from vllm_crossspec.drafters.base import drafter_kind
from vllm_crossspec.engine.vllm_api.models import register_models
from vllm_crossspec.tree.schedule import candidate_widths

# Set by vLLM itself when it builds the config; nobody writes them in JSON.
_INTERNAL_KEYS = {
    "target_model_config",
    "target_parallel_config",
    "draft_model_config",
    "draft_parallel_config",
}

_CARRIERS = ("dflash", "eagle3", "draft_model")
"""The methods for which vLLM makes room, the most first: slots ahead for what each of them drafts, one more for a
block, and states of the target for the first two. Beside any of them every other method has what it needs."""


def native_methods() -> set[str]:
    """Every method name that vLLM knows."""
    return {name for part in get_args(SpeculativeMethod) for name in (get_args(part) or (part,))}


def native_keys() -> set[str]:
    """Every key that vLLM's own speculative config takes."""
    return {f.name for f in dataclasses.fields(SpeculativeConfig)} - _INTERNAL_KEYS


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
        "method": drafter_kind(drafter.kind, "method").vllm_method,
        "model": drafter.model,
        "num_speculative_tokens": num_speculative_tokens,
        **drafter.native,
    }


def drafter_configs(
    settings: CrossSpecConfig, target_model_config: Any, target_parallel_config: Any
) -> dict[str, SpeculativeConfig]:
    """vLLM's own config for every drafter, by name; the first carries the engine.

    It plans for the longest draft, and is of the method for which vLLM makes most room (:data:`_CARRIERS`).
    """
    methods = {}
    for name, drafter in settings.drafters.items():
        kind = drafter_kind(drafter.kind, "method")
        register_models(kind)
        methods[name] = kind.vllm_method
    rank = {method: i for i, method in enumerate(_CARRIERS)}
    names = sorted(settings.drafters, key=lambda name: rank.get(methods[name], len(rank)))
    schedule, method = draft_schedule(settings), settings.draft_sample_method
    common = {} if method in (None, "coupled") else {"draft_sample_method": method}
    configs = {}
    for index, name in enumerate(names):
        drafter = settings.drafters[name]
        assert settings.num_speculative_tokens is not None
        planned = settings.planned(settings.num_speculative_tokens)
        tokens = planned if index == 0 else drafter.num_speculative_tokens
        extra = {"num_speculative_tokens_per_batch_size": schedule} if index == 0 and schedule else {}
        seen = _as_trusted(target_model_config, drafter)
        config = SpeculativeConfig(
            **native_dict(drafter, tokens or 0),
            **common,
            **extra,
            target_model_config=seen,
            target_parallel_config=target_parallel_config,
        )
        config.target_model_config = target_model_config
        if config.draft_model_config is seen:  # of methods without a model of vLLM's
            config.draft_model_config = target_model_config
        configs[name] = config
    return configs


def _as_trusted(target_model_config: Any, drafter: DrafterConfig) -> Any:
    """The target's config as its drafter's is made of it: leave to run a checkpoint's code was given for the target."""
    kind = drafter_kind(drafter.kind, "method")
    if not target_model_config.trust_remote_code or kind.may_bring_code or not kind.has_model:
        return target_model_config
    distrusted = copy.copy(target_model_config)
    distrusted.trust_remote_code = False
    return distrusted


def without_schedule(vllm_config: VllmConfig) -> VllmConfig:
    """The config without draft lengths by batch size, for CUDA graphs of passes whose width does not follow them."""
    own = copy.copy(vllm_config)
    own.speculative_config = copy.copy(vllm_config.speculative_config)
    own.speculative_config.num_speculative_tokens_per_batch_size = None
    return own
