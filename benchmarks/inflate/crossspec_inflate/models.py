"""Checkpoints as they are read and as they grow: the parts that all decoders of Qwen3's and Llama's form have."""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from crossspec_inflate import matrices
from crossspec_inflate.growth import Growth
from crossspec_inflate.matrices import Maker, Recipe

Recipes = dict[str, Recipe]
"""Of a model's tensors, by name."""

_NORMS = ("input_layernorm", "post_attention_layernorm")
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class Source:
    """A checkpoint that is to grow: its config.json, and tensors that are read when they are asked for.

    ``key`` is its name in messages. Raises ValueError, one sentence: no such folder, or damaged files.
    """

    def __init__(self, folder: Path, key: str):
        self.folder, self.key = folder, key
        try:
            self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError) as problem:
            raise ValueError(f"{key}: {folder} has no config.json that can be read ({problem})") from None
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._used: set[str] = set()
        dtypes = set()
        for file in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(file, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118
                        piece = opened.get_slice(name)
                        self._files[name], self._shapes[name] = file, tuple(piece.get_shape())
                        dtypes.add(piece.get_dtype())
            except (SafetensorError, OSError) as problem:
                raise ValueError(f"{key}: {file} is damaged or cut short ({problem}); copy it again") from None
        found = [_DTYPES[name] for name in _DTYPES if name in dtypes]
        if not found:
            raise ValueError(
                f"{key}: {folder} has no .safetensors with floating-point weights; give a whole checkpoint"
            )
        self.dtype = functools.reduce(torch.promote_types, found)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor. Raises ValueError without a tensor of that name."""
        self._used.add(name)
        if name not in self._shapes:
            raise ValueError(f"{self.key}: {self.folder} has no tensor {name}; give a whole checkpoint of its kind")
        return self._shapes[name]

    def reader(self, name: str) -> Callable[[Maker], torch.Tensor]:
        """What gives this tensor when it is asked for."""
        self.shape(name)

        def read(maker: Maker) -> torch.Tensor:
            with safe_open(self._files[name], framework="pt") as opened:
                tensor: torch.Tensor = opened.get_tensor(name)
            return tensor.to(maker.device, maker.dtype if tensor.is_floating_point() else None)

        return read

    def kept(self, name: str, dtype: torch.dtype | None = None) -> Recipe:
        """This tensor as it is."""
        return matrices.kept(self.reader(name), self.shape(name), dtype)

    def check_all_used(self) -> None:
        """Refuse a checkpoint with unread tensors: a model without them would be another one."""
        unknown = sorted(self._files.keys() - self._used)
        if unknown:
            raise ValueError(
                f"{self.key}: {self.folder} has the tensor {unknown[0]}, which inflating does not know; "
                "give a model of Qwen3's or Llama's form without biases, or leave it out"
            )


def grown_config(config: Mapping[str, Any], growth: Growth) -> dict[str, Any]:
    """The part of a config.json that describes a decoder, for the new shape."""
    new = growth.new
    changed: dict[str, Any] = {
        "hidden_size": new.hidden,
        "intermediate_size": new.mlp,
        "num_hidden_layers": new.layers,
        "num_attention_heads": new.heads,
        "num_key_value_heads": new.kv_heads,
        "head_dim": growth.head_dim,
        "rms_norm_eps": config["rms_norm_eps"] * growth.width.scale**2,
    }
    if config.get("layer_types"):
        changed["layer_types"] = ["full_attention"] * new.layers
        for old, place in enumerate(growth.places):
            changed["layer_types"][place] = config["layer_types"][old]
    return {**config, **changed}


def decoder_layer(
    source: Source, growth: Growth, names: tuple[str | None, str], *, blocks: int = 1, has_hidden_norm: bool = False
) -> Recipes:
    """A decoder layer's tensors.

    Queries and keys that are normed by head are scaled as the hidden states are: the norms share one epsilon.

    ``names`` are the old layer's beginning, ``model.layers.3.`` for example, or None for a layer that adds nothing, and
    the new one's. Its attention reads ``blocks`` hidden states side by side, the second behind a norm of its own
    where it ``has_hidden_norm``.
    """
    old, new = names
    width, head_dim = growth.width, growth.head_dim

    def reader(name: str) -> Callable[[Maker], torch.Tensor] | None:
        return source.reader(f"{old}{name}.weight") if old is not None else None

    norms_heads = f"{old if old is not None else 'model.layers.0.'}self_attn.q_norm.weight" in source
    scale = width.scale if norms_heads else 1.0
    num_queries, num_keys = growth.new.heads * head_dim, growth.new.kv_heads * head_dim
    q, kv, mlp = growth.query_heads, growth.kv_heads, growth.mlp
    made = {
        "self_attn.q_proj": matrices.inward(reader("self_attn.q_proj"), q, num_queries, width, blocks, scale),
        "self_attn.k_proj": matrices.inward(reader("self_attn.k_proj"), kv, num_keys, width, blocks, scale),
        "self_attn.v_proj": matrices.inward(reader("self_attn.v_proj"), kv, num_keys, width, blocks),
        "self_attn.o_proj": matrices.outward(reader("self_attn.o_proj"), q, num_queries, width),
        "mlp.gate_proj": matrices.inward(reader("mlp.gate_proj"), mlp, growth.new.mlp, width),
        "mlp.up_proj": matrices.inward(reader("mlp.up_proj"), mlp, growth.new.mlp, width),
        "mlp.down_proj": matrices.outward(reader("mlp.down_proj"), mlp, growth.new.mlp, width),
    }
    for name in (*_NORMS, *(["hidden_norm"] if has_hidden_norm else [])):
        made[name] = matrices.norm(reader(name), width)
    for name in ("self_attn.q_norm", "self_attn.k_norm") if norms_heads else ():
        read = reader(name)
        made[name] = Recipe((head_dim,), read if read is not None else _ones(head_dim))
    return {f"{new}{name}.weight": recipe for name, recipe in made.items()}


def _ones(size: int) -> Callable[[Maker], torch.Tensor]:
    return lambda maker: maker.full(1.0, size)


def head(source: Source, name: str, growth: Growth) -> Recipe:
    """An output layer [V, H]; the old one is [V, h]."""
    num_rows = source.shape(name)[0]
    return matrices.inward(source.reader(name), [(0, 0, num_rows)], num_rows, growth.width)


def vocabulary(source: Source, growth: Growth) -> Recipes:
    """What of a drafter's checkpoint is about tokens, as far as it is there: embedding, output layer, reduced ids."""
    made: Recipes = {}
    if (name := "embed_tokens.weight") in source:
        made[name] = matrices.widened(source.reader(name), source.shape(name), growth.width)
    if (name := "lm_head.weight") in source:
        made[name] = head(source, name, growth)
    for name, dtype in (("d2t", torch.int64), ("t2d", torch.bool)):
        if name in source:
            made[name] = source.kept(name, dtype)
    return made


def ties(source: Source, growth: Growth) -> bool:
    """Whether the grown model's input embedding can be its output layer, as the source's is.

    Not where a state lies there in several copies: each of them would add its part to the logits.
    """
    is_tied = bool(source.config.get("tie_word_embeddings", "lm_head.weight" not in source))
    return is_tied and len(growth.width.copies) == 1


def language_model(source: Source, growth: Growth) -> Recipes:
    """A causal language model's tensors."""
    embedding = "model.embed_tokens.weight"
    made = {embedding: matrices.widened(source.reader(embedding), source.shape(embedding), growth.width)}
    olds = {place: old for old, place in enumerate(growth.places)}
    for new in range(growth.new.layers):
        old = f"model.layers.{olds[new]}." if new in olds else None
        made |= decoder_layer(source, growth, (old, f"model.layers.{new}."))
    made["model.norm.weight"] = matrices.norm(source.reader("model.norm.weight"), growth.width)
    own_head = "lm_head.weight" if "lm_head.weight" in source else embedding
    if not ties(source, growth):
        made["lm_head.weight"] = head(source, own_head, growth)
    source.shape(own_head)
    return made


def language_model_config(source: Source, growth: Growth) -> dict[str, Any]:
    """Its config.json."""
    return {**grown_config(source.config, growth), "tie_word_embeddings": ties(source, growth)}
