"""JetSpec's checkpoints: DFlash's, with ``dflash_config.causal_head``, which vLLM does not read."""

from types import MappingProxyType
from typing import Any

from vllm_crossspec.drafters.dflash import checkpoint as dflash
from vllm_crossspec.types import DrafterFacts, TargetFacts

check_tensors = dflash.check_tensors


def read_facts(config: dict[str, Any], key: str, target: TargetFacts) -> DrafterFacts:
    """As DFlash's; vLLM is told that the block is causal."""
    block = config.get("dflash_config")
    if not isinstance(block, dict) or block.get("causal_head") is not True:
        raise ValueError(f"{key}: config.json has no dflash_config.causal_head that is true: it is no JetSpec drafter")
    as_dflash = {name: value for name, value in block.items() if name != "causal_head"}
    facts = dflash.read_facts({**config, "dflash_config": as_dflash}, key, target)
    return facts._replace(overrides=MappingProxyType({"is_causal": 1}))
