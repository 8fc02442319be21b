"""The models of a drafter's kind, made known to vLLM."""

from typing import Any

from vllm import ModelRegistry
from vllm.transformers_utils.configs.speculators.algos import register_speculator

from vllm_crossspec.drafters.base import DrafterKind, load

_known: set[str] = set()


def register_models(kind: DrafterKind) -> None:
    """Let vLLM find the models of ``kind``, and read its config.json; once per process, and nothing is imported."""
    if kind.name in _known:
        return
    _known.add(kind.name)
    for architecture, path in kind.models.items():
        ModelRegistry.register_model(architecture, path)
    if kind.speculators_reader:

        def read(config_dict: dict[str, Any], pre_trained_config: dict[str, Any]) -> None:
            load(kind.speculators_reader)(config_dict=config_dict, pre_trained_config=pre_trained_config)

        register_speculator(kind.name)(read)
