"""The models of a drafter's kind, made known to vLLM."""

from vllm import ModelRegistry
from vllm.transformers_utils.configs.speculators.algos import register_speculator

from vllm_crossspec.kinds.drafter import DrafterKind
from vllm_crossspec.kinds.registry import load

_known: set[str] = set()


def register_models(kind: DrafterKind) -> None:
    """Let vLLM find the models of ``kind``, and read its config.json; once per process, and nothing is imported."""
    if kind.name in _known:
        return
    _known.add(kind.name)
    for architecture, path in kind.models.items():
        ModelRegistry.register_model(architecture, path)
    if kind.speculators_reader:
        register_speculator(kind.name)(lambda **configs: load(kind.speculators_reader)(**configs))
