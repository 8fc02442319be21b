"""Checkpoints of standalone draft models: plain causal language models with the target's vocabulary."""

from typing import Any

from vllm_crossspec.kinds.checkpoint import require
from vllm_crossspec.kinds.tensors import Layout, Shapes, Sizes, check_layout, decoder_layer, is_quantized, layers_in
from vllm_crossspec.ranks import step_together
from vllm_crossspec.types import DrafterFacts, TargetFacts

_OF_OTHER_DRAFTERS = (
    "speculators_model_type", "draft_vocab_size", "dflash_config", "draft_length", "eagle_config", "n_predict",
    "markov_rank", "treeflash_config",
)  # fmt: skip
"""Fields of drafters that read the target's states."""
_OF_OTHER_INPUTS = ("vision_config", "audio_config", "text_config", "thinker_config")
_OF_PARALLEL_DRAFTS = ("pard_token", "ptd_token_id")
"""Fields of language models that draft all tokens in one pass (PARD)."""
_OF_LLAMA = ("LlamaForCausalLM", "MistralForCausalLM")
_OF_QWEN3 = ("Qwen3ForCausalLM",)
"""Architectures whose tensors are checked; vLLM checks all others."""
_CAUSAL = ("ForCausalLM", "LMHeadModel")


def read_facts(config: dict[str, Any], key: str, target: TargetFacts) -> DrafterFacts:
    """Read the facts of a text-only causal language model's config.json."""
    architectures = config.get("architectures") or []
    name = architectures[0] if architectures else "no architecture"
    foreign = [field for field in _OF_OTHER_DRAFTERS if field in config]
    parallel = [field for field in _OF_PARALLEL_DRAFTS if field in config]
    if parallel:
        raise ValueError(
            f"{key}: config.json has {parallel[0]}, so that this model drafts all tokens in one pass (PARD), which a "
            "draft model here does not; give a plain language model"
        )
    if foreign or any(mark in name for mark in ("Eagle", "eagle", "DFlash", "DSpark", "MTP")):
        raise ValueError(
            f"{key}: config.json ({name}) describes a drafter that reads the target's states, which {foreign or name} "
            "shows; name its own method, or give a language model of its own as the draft model"
        )
    if name.startswith("FlashHead"):
        raise ValueError(
            f"{key}: config.json describes {name}, clusters and a model in one folder; give the plain model as model "
            "and this folder as head.model"
        )
    other = [field for field in _OF_OTHER_INPUTS if field in config]
    is_causal = name.endswith(_CAUSAL) and not config.get("is_encoder_decoder")
    if other or not is_causal:
        raise ValueError(
            f"{key}: config.json describes {name}{f' with {other[0]}' if other else ''}, but a draft model is a causal "
            "language model of text alone; give one like Qwen3ForCausalLM"
        )
    vocab_size = require(config, "vocab_size", key)
    return DrafterFacts(target_hidden_size=None, vocab_size=vocab_size, draft_vocab_size=vocab_size, target_layers=())


def check_tensors(shapes: Shapes | None, config: dict[str, Any], facts: DrafterFacts, key: str) -> DrafterFacts:
    """Check that the files hold the tensors that config.json describes, for known architectures."""
    name, hidden = config["architectures"][0], config.get("hidden_size")
    if not shapes or not hidden or name not in (*_OF_LLAMA, *_OF_QWEN3):
        return facts
    num_layers = require(config, "num_hidden_layers", key)
    head: dict[str, Sizes] = {"lm_head.weight": (facts.vocab_size, hidden)}
    needed: dict[str, Sizes] = {"model.embed_tokens.weight": (facts.vocab_size, hidden), "model.norm.weight": (hidden,)}
    for index in range(num_layers):
        needed |= decoder_layer(f"model.layers.{index}.", config, reads=hidden, qk_norm=name in _OF_QWEN3)[0]
    needed, optional = (needed, head) if config.get("tie_word_embeddings") else (needed | head, {})
    if beyond := sorted(layers_in(shapes) - set(range(num_layers))):
        raise ValueError(
            f"{key}: its files hold a layer {beyond[0]}, and its config.json has num_hidden_layers {num_layers}; "
            "copy it again"
        )
    # vLLM accepts or refuses other tensors, such as a bias or a head's clusters.
    quantized = is_quantized(config)
    known = {name: sizes for name, sizes in shapes.items() if quantized or name in needed or name in optional}
    check_layout(known, Layout(needed, optional, {}, quantized), "draft model", key)
    return facts


def check_follows(config: Any, target: Any, parallel: Any, path: str) -> None:
    """Refuse a draft model that cannot serve every request of the target (``check_engine`` in ``kinds.drafter``)."""
    model = config.draft_model_config
    if model.max_model_len < target.max_model_len:
        raise ValueError(
            f"{path}model: {model.model} knows {model.max_model_len} positions, but the target is to have "
            f"{target.max_model_len}; set --max-model-len {model.max_model_len} or less, or give another draft model"
        )
    found = [
        what
        for what, present in (
            ("recurrent (mamba) layers", model.is_hybrid or model.is_attention_free),
            ("M-RoPE positions", model.uses_mrope),
            ("inputs beside text", model.is_multimodal_model),
        )
        if present
    ]
    if found:
        raise ValueError(f"{path}model: {model.model} has {' and '.join(found)}; give a plain transformer of text")
    if model.is_moe and step_together(parallel):
        raise ValueError(
            f"{path}model: {model.model} has experts, which this target's data-parallel ranks would share; "
            "give a dense model"
        )
