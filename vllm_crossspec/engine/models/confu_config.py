"""How vLLM reads a ConFu config.json, which has the form of the speculators library's."""

from typing import Any

from vllm.transformers_utils.configs.speculators.algos import SUPPORTED_SPECULATORS_TYPES


def read(config_dict: dict[str, Any], pre_trained_config: dict[str, Any]) -> None:
    """What vLLM does for EAGLE-3, and the sizes of what contemplates."""
    SUPPORTED_SPECULATORS_TYPES["eagle3"](config_dict=config_dict, pre_trained_config=pre_trained_config)
    pre_trained_config["architectures"] = ["ConfuForCausalLM"]
    for name in ("num_soft_prompts", "num_experts", "top_experts", "target"):
        pre_trained_config[name] = config_dict[name]
