"""vLLM's own speculative configs of our drafters: what carries each of them through the engine."""

import copy
from typing import Any

from pydantic import ValidationError
from vllm.config import SpeculativeConfig, VllmConfig

from vllm_crossspec.config.schema import CrossSpecConfig, DrafterConfig
from vllm_crossspec.load.schedule import draft_widths
from vllm_crossspec.vllm_api.models import register_models

_CARRIERS = ("dflash", "eagle3", "draft_model")
"""The methods for which vLLM makes room, the most first: slots ahead for what each of them drafts, one more for a
block, and states of the target for the first two. Beside any of them every other method has what it needs."""


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


def drafter_configs(
    settings: CrossSpecConfig, target_model_config: Any, target_parallel_config: Any
) -> dict[str, SpeculativeConfig]:
    """vLLM's own config for every drafter, by name; the first carries the engine.

    It plans for the longest draft, and is of the method for which vLLM makes most room (:data:`_CARRIERS`).
    """
    methods = {name: drafter.traits.vllm_method for name, drafter in settings.drafters.items()}
    rank = {method: i for i, method in enumerate(_CARRIERS)}
    names = sorted(settings.drafters, key=lambda name: rank.get(methods[name], len(rank)))
    schedule, method = draft_schedule(settings), settings.draft_sample_method
    common: dict[str, Any] = {"target_parallel_config": target_parallel_config}
    if method not in (None, "coupled"):
        common["draft_sample_method"] = method
    configs: dict[str, SpeculativeConfig] = {}
    for name in names:
        drafter = settings.drafters[name]
        register_models(drafter.traits)
        seen = _as_trusted(target_model_config, drafter)
        fields = {
            "method": methods[name],
            "model": drafter.model,
            "num_speculative_tokens": drafter.num_speculative_tokens or 0,
            **drafter.native,
            **common,
            "target_model_config": seen,
        }
        if not configs:  # the carrier
            fields["num_speculative_tokens"] = settings.planned(settings.num_nodes)
            if schedule:
                fields["num_speculative_tokens_per_batch_size"] = schedule
        config: SpeculativeConfig = _native_config(fields, settings, name)
        config.target_model_config = target_model_config
        _override(config, drafter)
        if config.draft_model_config is seen:  # of methods without a model of vLLM's
            config.draft_model_config = target_model_config
        configs[name] = config
    return configs


def _native_config(fields: dict[str, Any], settings: CrossSpecConfig, name: str) -> SpeculativeConfig:
    """vLLM's config of one drafter; ValueError, which names the key, for a value that vLLM does not take."""
    try:
        return SpeculativeConfig(**fields)
    except ValidationError as error:  # a page of pydantic's
        first = error.errors()[0]
        what = first["msg"].removeprefix("Value error, ")
        key = f"{settings.path_of(name)}{first['loc'][0]}" if first["loc"] else f"speculative_config ({name})"
        raise ValueError(f"{key}: {' '.join(what.split())}") from error


def _override(config: SpeculativeConfig, drafter: DrafterConfig) -> None:
    """Tell vLLM what config.json does not say, or says otherwise.

    A drafter that reads the target's states goes wherever the target goes. vLLM sees to that for EAGLE alone: others
    would look beyond their table of rotations.
    """
    model, target = config.draft_model_config, config.target_model_config
    if not drafter.target_layers or model is target:
        return
    for name, value in drafter.overrides.items():
        setattr(model.hf_config, name, value)
    known = getattr(model.hf_config, "max_position_embeddings", None)
    if known is not None and known < target.max_model_len:
        model.hf_config.max_position_embeddings = target.max_model_len
    model.max_model_len = target.max_model_len


def _as_trusted(target_model_config: Any, drafter: DrafterConfig) -> Any:
    """The target's config as its drafter's is made of it: leave to run a checkpoint's code was given for the target."""
    kind = drafter.traits
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
