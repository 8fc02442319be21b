"""DART checkpoints: the format of ``fvliang/qwen*-dart``, which ``crossspec train dart`` also writes."""

from typing import Any

from vllm_crossspec.drafters.eagle3.checkpoint import default_target_layers
from vllm_crossspec.kinds.checkpoint import require
from vllm_crossspec.kinds.tensors import Layout, Shapes, check_layout, decoder_layer, is_quantized, output_tensors
from vllm_crossspec.types import DrafterFacts, TargetFacts

ARCHITECTURE = "LlamaForCausalLMDart"
"""The reference's model name, by which vLLM finds ours."""


def read_facts(config: dict[str, Any], key: str, target: TargetFacts) -> DrafterFacts:
    """Read the facts of a DART config.json; ``draft_length`` masks and the entry before them draft a token each."""
    if "draft_length" not in config or "dflash_config" in config or "speculators_model_type" in config:
        kind = config.get("speculators_model_type") or config.get("architectures")
        raise ValueError(f"{key}: config.json has no draft_length ({kind}); it is not a DART drafter")
    layers = config.get("num_hidden_layers", 1)
    if layers != 1:
        raise ValueError(f"{key}: config.json describes {layers} layers; a DART drafter has one")
    draft_length = config["draft_length"]
    if not isinstance(draft_length, int) or draft_length < 1:
        raise ValueError(
            f"{key}: draft_length in config.json is {draft_length!r}; a DART drafter has at least one mask"
        )
    architectures = config.get("architectures")
    if architectures != [ARCHITECTURE]:
        raise ValueError(f'{key}: set "architectures" in config.json to ["{ARCHITECTURE}"] (it is {architectures})')
    hidden_size, vocab_size = require(config, "hidden_size", key), require(config, "vocab_size", key)
    return DrafterFacts(
        # It uses the target's embedding, so the widths are equal.
        target_hidden_size=hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=config.get("draft_vocab_size") or vocab_size,
        target_layers=default_target_layers(target.num_layers),
        max_draft_tokens=draft_length + 1,
        default_draft_tokens=draft_length + 1,
    )


def check_tensors(shapes: Shapes | None, config: dict[str, Any], facts: DrafterFacts, key: str) -> DrafterFacts:
    """Check that the files hold the tensors that config.json describes."""
    hidden, taps = config["hidden_size"], len(facts.target_layers)
    needed, optional = output_tensors(hidden, facts.vocab_size, facts.draft_vocab_size, has_own_head=True)
    own, may = decoder_layer("midlayer.", config, reads=2 * hidden, qk_norm=False)
    needed |= own | {
        "fc.weight": (hidden, taps * hidden),
        "norm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.mask_rep": (2 * hidden,),
    }
    if shapes:
        check_layout(shapes, Layout(needed, optional | may, {}, is_quantized(config)), "DART", key)
    return facts
