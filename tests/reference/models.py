"""A random Qwen3 target and random drafters for it, in float32, for which each mistake shows in the drafts.

Layers add as much to the residual stream as the embedding does, norm weights differ from one another, attention is
sharp enough to see positions, and theta is not the default of any library: a swapped norm, a shifted position or a
dropped setting changes the tokens.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import checkpoints
import torch
from safetensors.torch import load_file, save_file

VOCAB = 512
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    # EAGLE's attention takes hidden_size / heads, whatever its config.json says.
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
THETA = 20_000.0
LIVE_TOKENS = 4
MASK_TOKEN_ID = 3


class Models(NamedTuple):
    """Folders of one target and its drafters."""

    target: Path
    eagle3: Path
    dflash: Path
    dart: Path


def wide(folder: Path) -> Models:
    """Every token can be generated; EAGLE-3 and DART know a quarter of them. Hardly any draft is accepted."""
    target = _target(folder / "target")
    return Models(target, *_drafters(folder, target, draft_vocab_size=VOCAB // 4))


def narrow(folder: Path) -> Models:
    """Only ``LIVE_TOKENS`` tokens are ever generated or drafted, so chance alone gets drafts accepted."""
    target = _target(folder / "target")
    models = Models(target, *_drafters(folder, target, draft_vocab_size=LIVE_TOKENS))
    live = load_file(models.eagle3 / "model.safetensors")["t2d"].nonzero().flatten()
    for tensors in _rewritten(target):
        head = torch.zeros_like(tensors["lm_head.weight"])
        # Opposite rows: the largest of these logits is never below the zeros of all the others, and loud enough to
        # win when sampled.
        rows = tensors["lm_head.weight"][live[: LIVE_TOKENS // 2]] * 8
        head[live] = torch.cat([rows, -rows])
        tensors["lm_head.weight"] = head
    return models


def _target(folder: Path) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    rope = {"rope_type": "default", "rope_theta": THETA}
    config = Qwen3Config(**SIZES, rope_parameters=rope, tie_word_embeddings=False, dtype="float32")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    generator = torch.Generator().manual_seed(11)
    for tensors in _rewritten(folder):
        for name, old in tensors.items():
            scale = 1.0 if "embed_tokens" in name else old.shape[-1] ** -0.5
            tensors[name] = torch.randn(old.shape, generator=generator) * scale
        # With a loud mask embedding every slot of DFlash's block would say the same.
        tensors["model.embed_tokens.weight"][MASK_TOKEN_ID] *= 0.2
        _vary_norms(tensors, seed=12)
    return folder


def _drafters(folder: Path, target: Path, draft_vocab_size: int) -> tuple[Path, Path, Path]:
    eagle3 = checkpoints.random_eagle3(folder / "eagle3", target, draft_vocab_size)
    dflash = checkpoints.random_dflash(folder / "dflash", target, layers=(1, 3, 6))
    dart = checkpoints.random_dart(folder / "dart", target, draft_vocab_size)
    for seed, drafter in enumerate((eagle3, dflash, dart)):
        for tensors in _rewritten(drafter):
            _vary_norms(tensors, seed)
            for name in tensors:
                # Else the residual stream wins, and a draft is the same token over and over.
                if name.endswith(("o_proj.weight", "down_proj.weight", "k_proj.weight")):
                    tensors[name] *= 2.0
    return eagle3, dflash, dart


def _vary_norms(tensors: dict[str, torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, old in tensors.items():
        if name.endswith("norm.weight"):
            mean = 1.5 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
            tensors[name] = mean + 0.3 * torch.randn(old.shape, generator=generator)


def _rewritten(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """The weights of a folder, saved again when the loop's body is done."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    yield tensors
    save_file({k: v.contiguous() for k, v in tensors.items()}, path, metadata={"format": "pt"})
