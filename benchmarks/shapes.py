"""Config folders of a target and its drafters at public models' shapes, for runs with dummy weights.

A folder holds a ``config.json`` in the public format and no weights: ``load_format="dummy"`` fills tensors with random
numbers. Times are those of the real models, acceptance is not. Sources of the shapes: the ``config.json`` of
Qwen/Qwen3-0.6B, -4B, -8B and -14B, of AngelSlim's and SafeAILab's EAGLE-3 drafters, of z-lab/Qwen3-8B-DFlash-b16, and
fvliang/qwen8b-dart.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from crossspec_tools.flashhead.files import save_assets
from vllm_crossspec.drafters.confu.checkpoint import ARCHITECTURE, MODEL_TYPE
from vllm_crossspec.drafting.flashhead.assets import Assets
from vllm_crossspec.routing.checkpoint import RouterCheckpoint, RouterFacts, save_router


class Shape(NamedTuple):
    """Sizes of one Qwen3 target and of the drafters that go with it, whose layers are of the same size.

    Attributes:
        tied: whether the target's output head is its embedding.
        draft_vocab_size: of the EAGLE-3 and the DART drafter's own heads.
        dflash_block: tokens of a DFlash block, the last accepted one included.
        mask_token_id: the token that DFlash drafts in place of.
        dart_tokens: that one forward of the DART drafter drafts.
        soft_prompts, experts, top_experts: of the ConFu drafter.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    tied: bool
    head_dim: int = 128
    vocab_size: int = 151936
    draft_vocab_size: int = 32000
    dflash_layers: int = 5
    dflash_block: int = 16
    mask_token_id: int = 151669
    dart_tokens: int = 8
    soft_prompts: int = 16
    experts: int = 8
    top_experts: int = 2
    eos_token_id: int = 151645
    max_positions: int = 40960


SHAPES = {
    "0.6b": Shape(1024, 3072, 28, 16, 8, tied=True),
    "4b": Shape(2560, 9728, 36, 32, 8, tied=True),
    "8b": Shape(4096, 12288, 36, 32, 8, tied=False),
    "14b": Shape(5120, 17408, 40, 40, 8, tied=False),
    "pocket": Shape(256, 768, 8, 4, 2, tied=True)._replace(
        head_dim=64,
        vocab_size=4096,
        draft_vocab_size=4096,
        dflash_layers=2,
        dflash_block=8,
        mask_token_id=3,
        eos_token_id=2,
        max_positions=2048,
    ),
}
NUM_DFLASH_TAPS = 5
CLUSTER_SIZE, NUM_PROBES = 16, 256


def write_models(folder: Path, shape: Shape) -> dict[str, Path]:
    """Write the folders of the target, the drafters and a ``router`` below ``folder``.

    Returns:
        The path of each, by that name.
    """
    configs = {
        **drafter_configs(shape),
        "target": target_config(shape),
        "confu": confu_config(shape),
        "draft-model": target_config(draft_model_shape(shape)),
    }
    for name, config in configs.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config, indent=1))
        # Our check of a drafter's folder asks for a weight file; nobody reads a tensor from this one.
        save_file({"unused": torch.zeros(1)}, folder / name / "model.safetensors", metadata={"format": "pt"})
    save_router(folder / "router", random_router(shape.hidden_size))
    return {name: folder / name for name in (*configs, "router")}


def draft_model_shape(shape: Shape) -> Shape:
    """Of the draft model of its own: Qwen3-0.6B's, or two layers where the vocabulary is not Qwen3's."""
    small = SHAPES["0.6b"]
    if shape.vocab_size != small.vocab_size:
        return shape._replace(num_layers=2)
    return small._replace(num_layers=min(small.num_layers, shape.num_layers))


def write_clusters(folder: Path, shape: Shape) -> None:
    """Clusters for the draft model's output layer."""
    small = draft_model_shape(shape)
    clusters = made_up_clusters(small.vocab_size, small.hidden_size)
    save_assets(folder, clusters._replace(special_token_ids=(small.eos_token_id,)))


def made_up_clusters(vocab_size: int, hidden_size: int) -> Assets:
    """Random clusters of 16 tokens for an output layer whose weights are made up, too."""
    draw = torch.Generator().manual_seed(0)
    members = torch.randperm(vocab_size, generator=draw).view(-1, CLUSTER_SIZE).sort(dim=1).values
    centroids = torch.randn(len(members), hidden_size, generator=draw).to(torch.bfloat16)
    return Assets(centroids, members, (0, 1, 2), min(NUM_PROBES, len(members)), facts={"made": "at random"})


def random_router(hidden_size: int) -> RouterCheckpoint:
    """A router of the shape of a trained one, which takes either drafter about as often."""
    facts = RouterFacts(hidden_size, ("eagle3", "dflash"), "dummy", mean_lengths=(4.0, 4.0))
    draw = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(size, generator=draw) * size[-1] ** -0.5 for name, size in facts.shapes.items()}
    biases = {name: torch.zeros(size) for name, size in facts.shapes.items() if name.endswith("bias")}
    return RouterCheckpoint(facts, *(weights | biases).values())


def target_config(shape: Shape) -> dict[str, Any]:
    """``config.json`` of the Qwen3 target."""
    return _layer_config(shape) | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": shape.num_layers,
        "eos_token_id": shape.eos_token_id,
        "tie_word_embeddings": shape.tied,
    }


def drafter_configs(shape: Shape) -> dict[str, dict[str, Any]]:
    """``config.json`` of EAGLE-3 (SafeAILab's, AngelSlim's), DFlash (z-lab's) and DART (fvliang's)."""

    def config(architecture: str, model_type: str, num_layers: int, **more: Any) -> dict[str, Any]:
        about = {"architectures": [architecture], "model_type": model_type, "num_hidden_layers": num_layers}
        return _layer_config(shape) | about | {"tie_word_embeddings": False} | more

    small = {"draft_vocab_size": shape.draft_vocab_size}
    taps = {"mask_token_id": shape.mask_token_id, "target_layer_ids": dflash_taps(shape.num_layers)}
    block = {"layer_types": ["full_attention"] * shape.dflash_layers, "block_size": shape.dflash_block}
    target = {"num_target_layers": shape.num_layers, "dflash_config": taps}
    masks = {"draft_length": shape.dart_tokens - 1, "mlp_bias": False, "rope_scaling": None}  # length counts the masks
    return {
        "eagle3": config("LlamaForCausalLMEagle3", "llama", 1, **small),
        "dflash": config("DFlashDraftModel", "qwen3", shape.dflash_layers, **block, **target),
        "dart": config("LlamaForCausalLMDart", "llama", 1, **small, **masks),
    }


def confu_config(shape: Shape) -> dict[str, Any]:
    """``config.json`` of a ConFu drafter (docs/methods/confu.md), of no target's weights in particular."""
    return {
        "architectures": [ARCHITECTURE],
        "speculators_model_type": MODEL_TYPE,
        "draft_vocab_size": shape.draft_vocab_size,
        "target_hidden_size": shape.hidden_size,
        # What vLLM taps for an EAGLE-3 drafter whose config names no layers.
        "eagle_aux_hidden_state_layer_ids": [2, shape.num_layers // 2, shape.num_layers - 3],
        "norm_before_residual": False,
        "num_soft_prompts": shape.soft_prompts,
        "num_experts": shape.experts,
        "top_experts": shape.top_experts,
        "target": {
            "name": "dummy",
            "config": None,
            "weights": None,
            "num_hidden_layers": shape.num_layers,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
        },
        "speculators_config": {
            "algorithm": MODEL_TYPE,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "target"},
        },
        "torch_dtype": "bfloat16",
        "transformer_layer_config": _layer_config(shape)
        | {"model_type": "llama", "num_hidden_layers": 1, "mlp_bias": False, "rope_scaling": None}
        | {"tie_word_embeddings": False},
    }


def dflash_taps(num_layers: int) -> list[int]:
    """The target layers that z-lab's drafters tap: five, even from the second to the third from the end."""
    step = (num_layers - 4) / (NUM_DFLASH_TAPS - 1)
    return [round(1 + i * step) for i in range(NUM_DFLASH_TAPS)]


def _layer_config(shape: Shape) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_positions,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }
