"""Names and shapes of a drafter's tensors: what its config.json asks for, beside what its files hold."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

Sizes = tuple[int | None, ...]
"""Of one tensor; None where config.json leaves a size to the model's own default."""
Shapes = Mapping[str, tuple[int, ...]]
"""Of the tensors in a drafter's files, by name."""

_IGNORED = ("rotary_emb.",)
"""In names of tensors that no loader reads."""


class Layout(NamedTuple):
    """The tensors of one checkpoint.

    Attributes:
        needed: names and sizes of those that must be there.
        optional: of those that may be there: what is the target's otherwise, and what nothing reads.
        aliases: how a file may begin another's name, and the name here.
        is_quantized: whether matrices are packed, under names and in shapes of a library's own.
    """

    needed: dict[str, Sizes]
    optional: dict[str, Sizes]
    aliases: Mapping[str, str] = {"midlayer.": "layers.0."}
    is_quantized: bool = False


def check_layout(shapes: Shapes, layout: Layout, kind: str, key: str) -> None:
    """Raise ValueError, one sentence, for files that lack what the config asks for, or hold something else."""
    found = {_renamed(name, layout.aliases): (name, sizes) for name, sizes in shapes.items()}
    known = layout.needed | layout.optional
    for name, wanted in layout.needed.items():
        if name not in found and not (layout.is_quantized and _is_packed(name, wanted, found)):
            raise ValueError(f"{key}: its files have no tensor {name}, which its config.json asks for; copy it again")
    for name, (written, sizes) in found.items():
        wanted_sizes = known.get(name)
        if wanted_sizes is not None:
            _check_sizes(written, sizes, wanted_sizes, layout, key)
        elif not layout.is_quantized and not any(part in name for part in _IGNORED):
            raise ValueError(
                f"{key}: its files have a tensor {written}, which no {kind} drafter with this config.json has; "
                "it is of another kind or shape"
            )


def _check_sizes(name: str, sizes: tuple[int, ...], wanted: Sizes, layout: Layout, key: str) -> None:
    if layout.is_quantized and len(wanted) == 2:
        return
    fits = len(sizes) == len(wanted) and all(b in (a, None) for a, b in zip(sizes, wanted, strict=True))
    if not fits:
        asked = str([size if size is not None else "any" for size in wanted]).replace("'", "")
        raise ValueError(
            f"{key}: its tensor {name} has the shape {list(sizes)}, but its config.json asks for {asked}; "
            "config.json and weights are of different drafters"
        )


def _is_packed(name: str, sizes: Sizes, found: Mapping[str, Any]) -> bool:
    """Whether a matrix is there under a quantised name (``.qweight``, ``.weight_packed``, ...)."""
    module = name.removesuffix("weight")
    return len(sizes) == 2 and any(other.startswith(module) for other in found)


def _renamed(name: str, aliases: Mapping[str, str]) -> str:
    old = next((old for old in aliases if name.startswith(old)), "")
    return aliases[old] + name.removeprefix(old) if old else name


def layers_in(shapes: Shapes) -> set[int]:
    """The numbers of the layers that files hold."""
    numbers = (re.match(r"(?:model\.)?layers\.(\d+)\.", _renamed(name, {"midlayer.": "layers.0."})) for name in shapes)
    return {int(number[1]) for number in numbers if number}


def is_quantized(*configs: Mapping[str, Any]) -> bool:
    """Whether a config.json, or a part of it, says that its weights are packed."""
    return any(config.get(name) for config in configs for name in ("quantization_config", "compression_config"))


def decoder_layer(
    prefix: str, config: Mapping[str, Any], *, reads: int, qk_norm: bool
) -> tuple[dict[str, Sizes], dict[str, Sizes]]:
    """Sizes of what one decoder layer of Llama's or Qwen3's form needs, and of what it may have.

    It ``reads`` states of that width; with ``qk_norm`` queries and keys are normed.
    """
    hidden, ffn, heads = config.get("hidden_size"), config.get("intermediate_size"), config.get("num_attention_heads")
    kv_heads = config.get("num_key_value_heads")
    head_dim = config.get("head_dim")
    if head_dim is None and not qk_norm and heads and hidden:  # Qwen3 has a default of its own
        head_dim = hidden // heads
    q, kv = (count * head_dim if count and head_dim else None for count in (heads, kv_heads))
    needed: dict[str, Sizes] = {
        "self_attn.q_proj.weight": (q, reads),
        "self_attn.k_proj.weight": (kv, reads),
        "self_attn.v_proj.weight": (kv, reads),
        "self_attn.o_proj.weight": (hidden, q),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if qk_norm:
        needed |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    optional: dict[str, Sizes] = {"self_attn.o_proj.bias": (hidden,)}
    if config.get("attention_bias"):
        needed |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    if config.get("mlp_bias"):
        needed |= {"mlp.gate_proj.bias": (ffn,), "mlp.up_proj.bias": (ffn,), "mlp.down_proj.bias": (hidden,)}
    return ({prefix + k: v for k, v in needed.items()}, {prefix + k: v for k, v in optional.items()})


def output_tensors(
    hidden: int, vocab_size: int, draft_vocab_size: int, *, has_own_head: bool = False
) -> tuple[dict[str, Sizes], dict[str, Sizes]]:
    """Sizes of the tensors around a drafter's vocabulary: those that it needs, and those that it may have.

    A drafter that knows every token may leave out its head, which is the target's then.
    """
    is_smaller = draft_vocab_size < vocab_size
    needed: dict[str, Sizes] = {}
    optional: dict[str, Sizes] = {"t2d": (vocab_size,), "embed_tokens.weight": (vocab_size, hidden)}
    (needed if has_own_head or is_smaller else optional)["lm_head.weight"] = (draft_vocab_size, hidden)
    (needed if is_smaller else optional)["d2t"] = (draft_vocab_size,)
    return needed, optional
