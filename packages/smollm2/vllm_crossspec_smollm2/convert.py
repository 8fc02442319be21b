"""From a GGUF file of a Llama to the folder that vLLM reads: config, weights in bfloat16, tokenizer with chat template.

The library ``gguf`` reads and dequantizes the file, ``transformers`` saves the tokenizer. Other architectures and
other tokenizers than byte-level BPE are refused.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Modules by their names in GGUF. A model with an output layer of its own has one more, and is refused."""

BYTES_PER_WEIGHT = 2
OTHER_BYTES = 32 << 20
"""Of the config, the tokenizer and the draft model's own layers, generously."""

INDIVIDUAL_DIGITS = ("smollm",)
"""Pre-tokenizers of GGUF that split a text at every digit before anything else."""
CONTROL = 3
"""GGUF's type of tokens that no text may spell."""
WEIGHTS = "model.safetensors"

Report = Callable[[int, int], None]
"""Called with how many tensors are done, and of how many."""


def open_gguf(file: Path) -> Any:
    """The library's reader of the file. Raises ValueError: it is no whole GGUF file of a Llama."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
    except (ValueError, IndexError, KeyError) as problem:
        raise ValueError(f"{file} is no whole GGUF file ({' '.join(str(problem).split())})") from problem
    for key, wanted in (("general.architecture", "llama"), ("tokenizer.ggml.model", "gpt2")):
        if (found := _field(reader, key)) != wanted:
            raise ValueError(f"{file}: {key} is {found!r}, and only {wanted!r} can be converted")
    return reader


def num_bytes(reader: Any, drafter: Path) -> int:
    """About what the converted folder takes on a disk, with a draft model if ``drafter`` holds one."""
    sizes = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
    num_weights = sum(sizes.values()) + (sizes["token_embd.weight"] if drafter.is_dir() else 0)
    return num_weights * BYTES_PER_WEIGHT + OTHER_BYTES


def convert(reader: Any, out: Path, report: Report = lambda done, total: None) -> None:
    """Write config.json, model.safetensors and the tokenizer's files into an empty folder."""
    config = config_of(reader)
    _write_weights(reader, config, out / WEIGHTS, report)
    _tokenizer_of(reader).save_pretrained(out)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def put_together(drafter: Path, target: Path, out: Path) -> None:
    """A draft model's folder: what ``drafter`` holds, and the embedding of ``target``, which the former leaves out."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    name = f"{NAMES['token_embd']}.weight"
    with safe_open(target / WEIGHTS, "pt") as weights:
        tensors = load_file(drafter / WEIGHTS) | {name: weights.get_tensor(name)}
    shutil.copytree(drafter, out, ignore=shutil.ignore_patterns(WEIGHTS))
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})


def config_of(reader: Any) -> dict[str, Any]:
    """The model's config.json, by the file's own numbers."""

    def of_model(key: str) -> Any:
        return _field(reader, f"llama.{key}")

    def token(name: str) -> int | None:
        return _field(reader, f"tokenizer.ggml.{name}_token_id", None)

    heads = of_model("attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(_field(reader, "tokenizer.ggml.tokens")),
        "hidden_size": of_model("embedding_length"),
        "intermediate_size": of_model("feed_forward_length"),
        "num_hidden_layers": of_model("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": of_model("attention.head_count_kv"),
        "head_dim": of_model("embedding_length") // heads,
        "hidden_act": "silu",
        "max_position_embeddings": of_model("context_length"),
        "rms_norm_eps": of_model("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": of_model("rope.freq_base")},
        "tie_word_embeddings": True,
        "bos_token_id": token("bos"),
        "eos_token_id": token("eos"),
        "pad_token_id": token("padding"),
    }


def _write_weights(reader: Any, config: dict[str, Any], file: Path, report: Report) -> None:
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for number, tensor in enumerate(reader.tensors):
        block, _, module = tensor.name.removesuffix(".weight").rpartition(".")
        if module not in NAMES:
            raise ValueError(f"{tensor.name}: no such tensor is known of a Llama with tied embeddings")
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))  # [rows, columns] or [columns] float32
        if module in heads:
            values = _rows_of_transformers(values, heads[module])
        layer = block.replace("blk.", "model.layers.") + "." if block else ""
        weights[f"{layer}{NAMES[module]}.weight"] = values.to(torch.bfloat16).contiguous()
        report(number + 1, len(reader.tensors))
    save_file(weights, file, metadata={"format": "pt"})


def _rows_of_transformers(weights: Any, num_heads: int) -> Any:
    """Rows of a query or key projection [heads * head_dim, columns] in the order that transformers and vLLM rotate.

    They rotate row i of a head with row i + head_dim / 2; llama.cpp stores such two side by side.
    """
    rows, columns = weights.shape
    return weights.reshape(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _tokenizer_of(reader: Any) -> Any:
    """Transformers' tokenizer: byte-level BPE with the file's vocabulary, merges, special tokens and chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    model = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if _field(reader, "tokenizer.ggml.pre", None) in INDIVIDUAL_DIGITS:
        model.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_bytes])
    else:
        model.pre_tokenizer = by_bytes
    model.decoder = decoders.ByteLevel()
    kinds = _field(reader, "tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    model.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    ids = {name: _field(reader, f"tokenizer.ggml.{key}_token_id", None) for name, key in SPECIAL.items()}
    special = {name: tokens[i] for name, i in ids.items() if i is not None}
    template = _field(reader, "tokenizer.chat_template", None)
    return PreTrainedTokenizerFast(tokenizer_object=model, chat_template=template, **special)


SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

_REQUIRED = object()


def _field(reader: Any, key: str, default: Any = _REQUIRED) -> Any:
    """A value of the file's head. Raises ValueError where it has none and there is no default."""
    field = reader.get_field(key)
    if field is None and default is _REQUIRED:
        raise ValueError(f"the GGUF file has no {key!r}")
    return default if field is None else field.contents()
