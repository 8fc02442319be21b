"""Tiny random targets whose layers keep no keys and values, or others than most: latent, recurrent, ALiBi, chunks."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import checkpoints
import engines
import target_kinds
import transformers

# vLLM has no tied output layer for these: it would be left as the memory was.
UNTIED = target_kinds.SMALL | {"tie_word_embeddings": False}
# vLLM's CPU kernel of latent attention knows these two sizes alone; and its rotary kernel, which plain positions take,
# reads queries as if they lay close together: with YaRN, as in every DeepSeek-V2 and V3, positions are PyTorch's.
LATENT = UNTIED | {
    "num_key_value_heads": 2,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
MAMBA2 = {"intermediate_size": 128, "head_dim": 32, "num_heads": 4, "n_groups": 1, "chunk_size": 16, "state_size": 16}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek2": ("DeepseekV2", LATENT | {"q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek3": ("DeepseekV3", LATENT | {"q_lora_rank": 48, "topk_method": "noaux_tc"}),
    "mamba2": ("Mamba2", target_kinds.SMALL | MAMBA2 | {"num_hidden_layers": 4}),
    "falcon-h1": (
        "FalconH1",
        target_kinds.SMALL
        | {"head_dim": 32, "mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16}
        | {"mamba_n_groups": 1, "mamba_chunk_size": 16},
    ),
    "qwen3-next": (
        "Qwen3Next",
        UNTIED
        | {"head_dim": 32, "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
        | {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
        # All experts of a token: to choose other ones for a rounding would be another model.
        | {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        | {"shared_expert_intermediate_size": 64},
    ),
    "mamba": ("Mamba", target_kinds.SMALL | {"state_size": 16}),
    "jamba": ("Jamba", target_kinds.SMALL | {"mamba_d_state": 16, "mamba_dt_rank": 8, "num_experts": 2}),
    "bloom": ("Bloom", target_kinds.SMALL | {"n_layer": 2, "n_head": 2}),
    "llama4": (
        "Llama4",
        UNTIED
        | {"num_hidden_layers": 4, "head_dim": 32, "intermediate_size": 48, "intermediate_size_mlp": 96}
        | {"num_local_experts": 2, "interleave_moe_layer_step": 2}
        | {"attention_chunk_size": 32, "no_rope_layers": [1, 1, 1, 0]},
    ),
}


@functools.cache
def folder(kind: str, num_layers: int | None = None) -> Path:
    """A target of this kind, written once."""
    name, sizes = KINDS[kind]
    if num_layers is not None:
        sizes = sizes | {"num_hidden_layers": num_layers, "layer_types": sizes["layer_types"][:num_layers]}
    config_class = getattr(transformers, f"{name}{'Text' if kind == 'llama4' else ''}Config")
    model_class = getattr(transformers, f"{name}ForCausalLM")
    return target_kinds.write_random(Path(tempfile.mkdtemp()), config_class(**sizes), model_class)


@functools.cache
def eagle3(kind: str) -> dict[str, Any]:
    """A random EAGLE-3 drafter of this target, with chains."""
    path = Path(tempfile.mkdtemp())
    config = json.loads((folder(kind) / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"rope_theta": 10000.0}))
    checkpoints.random_eagle3(path / "drafter", path)
    return {
        "method": "eagle3",
        "model": str(path / "drafter"),
        "num_speculative_tokens": 3,
        "tree": engines.CHAIN,
    }
