"""Reads a ConFu config.json, which has the speculators library's form, for vLLM."""

from typing import Any

from vllm.transformers_utils.configs.speculators.algos import SUPPORTED_SPECULATORS_TYPES


def read(config_dict: dict[str, Any], pre_trained_config: dict[str, Any]) -> None:
    """Read EAGLE-3's settings as vLLM does, and the sizes of ConFu's additions."""
    SUPPORTED_SPECULATORS_TYPES["eagle3"](config_dict=config_dict, pre_trained_config=pre_trained_config)
    pre_trained_config["architectures"] = ["ConfuForCausalLM"]
    for name in ("num_soft_prompts", "num_experts", "top_experts", "target"):
        pre_trained_config[name] = config_dict[name]
