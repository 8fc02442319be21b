"""Tiny random targets with sliding windows, attention sinks and capped logits, in the architectures that have them."""

import functools
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

WINDOW = 24
VOCAB = 300
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "sliding_window": WINDOW,
    # A random target that is sure of itself: near-ties would make exact tests flaky.
    "initializer_range": 0.25,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
KINDS: dict[str, dict[str, Any]] = {
    "mistral": {},
    "gemma3": {**ALTERNATING, "query_pre_attn_scalar": 32},
    "gemma2": {**ALTERNATING, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 3.0},
    "granite": {**ALTERNATING, "attention_sinks": True, "attention_multiplier": 32**-0.5, "hidden_size": 128},
    "gpt_oss": {**ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False},
}
CLASSES = {"mistral": "Mistral", "gemma3": "Gemma3Text", "gemma2": "Gemma2", "granite": "Granite", "gpt_oss": "GptOss"}
SINKS = ("granite", "gpt_oss")
MODELS = {"gemma3": "Gemma3"}


def write(folder: Path, kind: str, **changes: Any) -> Path:
    """A target of this kind, the same whenever it is written."""
    config: PretrainedConfig = getattr(transformers, f"{CLASSES[kind]}Config")(**(SIZES | KINDS[kind] | changes))
    torch.manual_seed(0)
    model = getattr(transformers, f"{MODELS.get(kind, CLASSES[kind])}ForCausalLM")(config)
    tensors = model.state_dict()
    if kind in SINKS:  # transformers' Granite has none, vLLM's has
        generator = torch.Generator().manual_seed(1)
        for layer in range(config.num_hidden_layers):
            tensors[f"model.layers.{layer}.self_attn.sinks"] = 2 * torch.randn(4, generator=generator)
    if kind.startswith("gemma"):  # tied embeddings as loud as Gemma's would have it say one token for ever
        for name, tensor in tensors.items():
            if "post_" in name:
                tensor += 6.0
    model.save_pretrained(folder, state_dict=tensors)
    return folder


@functools.cache
def prompts() -> list[dict[str, list[int]]]:
    """A prompt that is shorter than the window, one much longer, and one that repeats itself."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(3, VOCAB, (200,), generator=generator).tolist()
    return [{"prompt_token_ids": ids} for ids in (tokens[:7], tokens[7:117], tokens[120:131] * 6)]
