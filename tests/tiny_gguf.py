"""A tiny Llama as the folder of transformers, and the same model as llama.cpp's converter writes it to GGUF."""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ċ Ċ", "Ġ w")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def alphabet() -> list[str]:
    """The 256 characters that stand for bytes, in the order of the bytes' first use by byte-level BPE."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(CONTROL) + 256 + len(MERGES),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config)
    for weight in model.parameters():  # norms that are all ones would hide a mix-up
        torch.nn.init.normal_(weight, std=0.3)
    return model


def permuted(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """As llama.cpp's `convert_hf_to_gguf.py` has it (`LlamaModel.permute`)."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def write_gguf(file: Path, model: LlamaForCausalLM, quantized: str = "F32", pre: str = "smollm", **more: float) -> None:
    """Write the model with weight matrices of a quantization; ``more`` are further keys of numbers."""
    from gguf import GGMLQuantizationType, GGUFWriter, TokenType
    from gguf.quants import quantize

    config, kind = model.config, GGMLQuantizationType[quantized]
    writer = GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    tokens = [*CONTROL, *alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * len(CONTROL) + [TokenType.NORMAL] * (len(tokens) - len(CONTROL)))
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for key, value in more.items():
        writer.add_float32(key, value)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in model.model.state_dict().items():
        values = tensor.float().numpy()
        if name.startswith("layers."):
            _, layer, rest = name.removesuffix(".weight").split(".", 2)
            values = permuted(values, heads[NAMES[rest]]) if NAMES[rest] in heads else values
            gguf_name = f"blk.{layer}.{NAMES[rest]}.weight"
        else:
            gguf_name = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}[name]
        if values.ndim == 2 and quantized != "F32":
            writer.add_tensor(gguf_name, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def install(folder: Path, package: str, version: str) -> None:
    """The record of an installed package, in a folder of ``sys.path``."""
    record = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


def damage_json(file: Path) -> None:
    """Make it JSON of another shape."""
    file.write_text(json.dumps([1]))
