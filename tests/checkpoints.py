"""Drafter folders for the tests: random weights in every public format, and one format rewritten as another."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from vllm_crossspec.kinds.identity import identify

EAGLE3_LAYER = "midlayer."


def _tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        is_norm = len(shape) == 1
        tensors[name] = torch.ones(shape) if is_norm else torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    return tensors


def _layer_shapes(prefix: str, c: dict, qkv_input: int, qk_norm: bool) -> dict[str, tuple[int, ...]]:
    hidden, heads, kv, dim, ffn = (
        c[k]
        for k in (
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
        )
    )
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (heads * dim, qkv_input),
        "self_attn.k_proj.weight": (kv * dim, qkv_input),
        "self_attn.v_proj.weight": (kv * dim, qkv_input),
        "self_attn.o_proj.weight": (hidden, heads * dim),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if qk_norm:
        shapes |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    return {prefix + name: shape for name, shape in shapes.items()}


def _layer_config(target: dict) -> dict:
    theta = target.get("rope_theta") or target["rope_parameters"]["rope_theta"]
    keys = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
    )
    return {k: target[k] for k in (*keys, "max_position_embeddings", "rms_norm_eps")} | {
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_theta": theta,
        "tie_word_embeddings": False,
    }


def _write(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


def random_eagle3(
    folder: Path,
    target_folder: Path,
    draft_vocab_size: int | None = None,
    seed: int = 0,
    flavour: str = "llama",
) -> Path:
    """A random EAGLE-3 drafter for a target folder, in SafeAILab's format; the qwen3 flavour has QK norms."""
    target = json.loads((target_folder / "config.json").read_text())
    c = _layer_config(target)
    hidden, vocab = c["hidden_size"], c["vocab_size"]
    draft_vocab = draft_vocab_size or vocab
    shapes = _layer_shapes(EAGLE3_LAYER, c, 2 * hidden, qk_norm=flavour == "qwen3")
    shapes |= {f"{EAGLE3_LAYER}hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    shapes |= {"fc.weight": (hidden, 3 * hidden), "lm_head.weight": (draft_vocab, hidden)}
    tensors = _tensors(shapes, seed)
    if draft_vocab < vocab:
        kept = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:draft_vocab].sort().values
        tensors["d2t"] = kept - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, kept, True)
    config = c | {
        "architectures": [{"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}[flavour]],
        "model_type": flavour,
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab,
        "torch_dtype": "float32",
    }
    return _write(folder, config, tensors)


def random_dart(folder: Path, target_folder: Path, draft_vocab_size: int, draft_length: int = 7, seed: int = 0) -> Path:
    """A random DART drafter for a target folder, in fvliang's format; it knows the tokens of ``random_eagle3``."""
    target = json.loads((target_folder / "config.json").read_text())
    c = _layer_config(target)
    hidden, vocab = c["hidden_size"], c["vocab_size"]
    shapes = _layer_shapes(EAGLE3_LAYER, c, 2 * hidden, qk_norm=False)
    shapes |= {f"{EAGLE3_LAYER}hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    shapes |= {"fc.weight": (hidden, 3 * hidden), "lm_head.weight": (draft_vocab_size, hidden)}
    tensors = _tensors(shapes, seed + 1)
    tensors[f"{EAGLE3_LAYER}mask_rep"] = torch.randn(2 * hidden, generator=torch.Generator().manual_seed(seed + 2))
    kept = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:draft_vocab_size].sort().values
    tensors["d2t"] = kept - torch.arange(draft_vocab_size)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, kept, True)
    config = c | {
        "architectures": ["LlamaForCausalLMDart"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_length": draft_length,
        "draft_vocab_size": draft_vocab_size,
        "torch_dtype": "float32",
    }
    return _write(folder, config, tensors)


def random_dflash(folder: Path, target_folder: Path, layers: tuple[int, ...] = (1, 4), block_size: int = 8) -> Path:
    """A random DFlash drafter of two layers for a target folder, in z-lab's format."""
    target = json.loads((target_folder / "config.json").read_text())
    c = _layer_config(target)
    hidden = c["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, len(layers) * hidden)}
    shapes |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for index in range(2):
        shapes |= _layer_shapes(f"layers.{index}.", c, hidden, qk_norm=True)
    config = c | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_target_layers": target["num_hidden_layers"],
        "layer_types": ["full_attention"] * 2,
        "block_size": block_size,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": list(layers)},
        "dtype": "float32",
    }
    return _write(folder, config, _tensors(shapes, 1))


def as_jetspec(folder: Path, dflash: Path) -> Path:
    """A DFlash drafter's weights as a JetSpec drafter, whose block is causal."""
    config = json.loads((dflash / "config.json").read_text())
    config["dflash_config"] = config["dflash_config"] | {"causal_head": True}
    return _write(folder, config, load_file(dflash / "model.safetensors"))


def random_draft_model(folder: Path, target_folder: Path) -> Path:
    """A random language model of two layers with a target's vocabulary, as Qwen3's are saved."""
    target = json.loads((target_folder / "config.json").read_text())
    c = _layer_config(target)
    hidden, vocab = c["hidden_size"], c["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    shapes |= {"lm_head.weight": (vocab, hidden)}
    for index in range(2):
        shapes |= _layer_shapes(f"model.layers.{index}.", c, hidden, qk_norm=True)
    config = c | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 2}
    return _write(folder, config, _tensors(shapes, 2))


def random_confu(
    folder: Path, target_folder: Path, draft_vocab_size: int | None = None, *,
    num_soft_prompts: int = 4, num_experts: int = 3, top_experts: int = 2, seed: int = 0,
) -> Path:  # fmt: skip
    """A random ConFu drafter for a target folder; its layer and its tokens are those of ``random_eagle3``."""
    target = json.loads((target_folder / "config.json").read_text())
    config, tensors = _read(random_eagle3(folder, target_folder, draft_vocab_size, seed))
    hidden, layers, kv, dim = (
        target[k] for k in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim")
    )
    generator = torch.Generator().manual_seed(seed + 3)
    tensors = {name.replace(EAGLE3_LAYER, "layers.0."): x for name, x in tensors.items()}
    tensors |= {
        name: torch.randn(shape, generator=generator)
        for name, shape in {
            "soft_prompts.keys": (layers, kv, num_soft_prompts, dim),
            "soft_prompts.values": (layers, kv, num_soft_prompts, dim),
            "contemplate_embed.router": (num_experts, 3 * hidden),
            "contemplate_embed.experts": (num_experts, hidden),
            "future_embed.router": (num_experts, hidden),
            "future_embed.experts": (num_experts, hidden),
            "future_skip.weight": (hidden, hidden),
            "no_future_embed": (hidden,),
        }.items()
    }
    layer = {k: v for k, v in config.items() if k not in ("architectures", "draft_vocab_size", "torch_dtype")}
    identity = identify(str(target_folder), "target")
    wrapped = {
        "architectures": ["ConfuSpeculator"],
        "speculators_model_type": "confu",
        "draft_vocab_size": config["draft_vocab_size"],
        "target_hidden_size": hidden,
        "eagle_aux_hidden_state_layer_ids": [2, layers // 2, layers - 3],
        "norm_before_residual": False,
        "num_soft_prompts": num_soft_prompts,
        "num_experts": num_experts,
        "top_experts": top_experts,
        "target": identity._asdict() | {"num_hidden_layers": layers, "num_key_value_heads": kv, "head_dim": dim},
        "speculators_config": _speculators_config("confu", target_folder),
        "torch_dtype": "float32",
        "transformer_layer_config": layer,
    }
    return _write(folder, wrapped, tensors)


def _read(folder: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def eagle3_as_bin(source: Path, folder: Path) -> Path:
    """The same drafter with its weights in ``pytorch_model.bin``, as SafeAILab publishes them."""
    config, tensors = _read(source)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(tensors, folder / "pytorch_model.bin")
    return folder


def eagle3_as_speculators(
    source: Path, folder: Path, target_folder: Path, model_type: str = "llama", own_embedding: bool = False
) -> Path:
    """The same drafter in the speculators library's format, with or without an embedding of its own."""
    config, tensors = _read(source)
    renamed = {k.replace(EAGLE3_LAYER, "layers.0."): v for k, v in tensors.items()}
    if own_embedding:
        renamed["embed_tokens.weight"] = load_file(target_folder / "model.safetensors")["model.embed_tokens.weight"]
    layer = {k: v for k, v in config.items() if k not in ("architectures", "draft_vocab_size")}
    layer |= {"model_type": model_type, "architectures": ["LlamaForCausalLM"]}
    wrapped = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "draft_vocab_size": config["draft_vocab_size"],
        "norm_before_residual": False,
        "transformer_layer_config": layer,
        "speculators_config": _speculators_config("eagle3", target_folder),
    }
    return _write(folder, wrapped, renamed)


def dflash_as_speculators(source: Path, folder: Path, target_folder: Path) -> Path:
    """The same drafter in the speculators library's format, whose layer ids are z-lab's + 1."""
    config, tensors = _read(source)
    dflash = config["dflash_config"]
    layer = {k: v for k, v in config.items() if k not in ("architectures", "dflash_config", "block_size")}
    wrapped = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.5.0",
        "block_size": config["block_size"],
        "draft_vocab_size": config["vocab_size"],
        "mask_token_id": dflash["mask_token_id"],
        "aux_hidden_state_layer_ids": [i + 1 for i in dflash["target_layer_ids"]],
        "transformer_layer_config": layer,
        "speculators_config": _speculators_config("dflash", target_folder),
    }
    return _write(folder, wrapped, tensors)


def _speculators_config(algorithm: str, target_folder: Path) -> dict:
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
        "verifier": {"name_or_path": str(target_folder), "architectures": ["Qwen3ForCausalLM"]},
    }
