"""A tiny random target, text for it and the drafters' settings: what the tests of training share."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

from crossspec_tools.train.cli import app as train_app
from crossspec_tools.train.dart import train_dart
from crossspec_tools.train.data import IM_END
from crossspec_tools.train.dflash import train_dflash
from crossspec_tools.train.draft_model import train_draft_model
from crossspec_tools.train.eagle3 import train_eagle3
from crossspec_tools.train.generate import generate
from crossspec_tools.train.generations import Generation
from crossspec_tools.train.recipes import (
    ConfuConfig,
    DartConfig,
    DFlashConfig,
    DraftModelConfig,
    Eagle3Config,
    GenerateConfig,
    LoopConfig,
)
from crossspec_tools.train.states import FrozenTarget, load_target
from crossspec_tools.train.target import train_tokenizer

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, DEPTH = 288, 32, 2, 1, 32, 8
EAGLE3 = Eagle3Config(
    intermediate_size=48, draft_vocab_size=96, num_steps=4, rows_per_step=4, anchors_per_row=8, bfloat16=False
)
DFLASH = DFlashConfig(
    intermediate_size=48,
    block_size=5,
    num_target_layers=3,
    rows_per_step=4,
    anchors_per_row=8,
    bfloat16=False,
)
DART = DartConfig(
    intermediate_size=48, draft_vocab_size=96, num_drafts=4, rows_per_step=4, anchors_per_row=8, bfloat16=False
)
DRAFT_MODEL = DraftModelConfig(
    num_layers=1, intermediate_size=16, teacher_temperature=0.3, num_drafts=4, rows_per_step=4, bfloat16=False
)
CONFU = ConfuConfig(
    num_steps=4,
    rows_per_step=4,
    anchors_per_row=5,
    bfloat16=False,
    num_soft_prompts=3,
    num_experts=4,
    replicas=2,
    max_lag=3,
)
"""It has to be given the ``start`` that it goes on from."""
RESPONSES = GenerateConfig(max_prompt_tokens=64, max_new_tokens=24, shard_rows=20)
LOOP = LoopConfig(steps=24, lr=1e-2, warmup=4, save_every=6, eval_every=12)
TRAINERS = {
    "eagle3": (train_eagle3, EAGLE3),
    "dflash": (train_dflash, DFLASH),
    "dart": (train_dart, DART),
    "draft-model": (train_draft_model, DRAFT_MODEL),
}


def texts() -> list[dict[str, str]]:
    """Forty rows of question and answer, with few words."""
    rng = random.Random(0)
    things, verbs = ["river", "stone", "lamp", "garden", "engine"], ["holds", "moves", "follows", "lights"]
    rows = []
    for number in range(40):
        a, verb, b = rng.choice(things), rng.choice(verbs), rng.choice(things)
        rows.append(
            {
                "category": ["chat", "math"][number % 2],
                "source": "test",
                "prompt": f"What does the {a} do?",
                "response": f"The {a} {verb} the {b}, and the {b} {verb} the {a}.",
            }
        )
    return rows


def write_text(folder: Path) -> None:
    """Two files of rows, to train on and to measure with."""
    lines = [json.dumps(row) + "\n" for row in texts()]
    (folder / "train-a.jsonl").write_text("".join(lines[:32]))
    (folder / "dev-a.jsonl").write_text("".join(lines[32:]))


def write_target(folder: Path) -> None:
    """A random Qwen3 target with a tokenizer for the text."""
    tokenizer = train_tokenizer([r["prompt"] + r["response"] for r in texts()] * 4, VOCAB, seed=0)
    assert len(tokenizer) == VOCAB
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.convert_tokens_to_ids(IM_END),
        initializer_range=0.2,  # a random target that is sure of itself: near-ties would make exact tests flaky
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_responses(folder: Path, data: Path, target_folder: Path) -> None:
    """The target's own answers to the text's prompts."""
    generate(data, target_folder, folder, RESPONSES)


def write_eagle3(folder: Path, responses: Path, target_folder: Path) -> Path:
    """An EAGLE-3 drafter, trained a little: the folder that others may start from."""
    train_eagle3(responses, target_folder, folder, EAGLE3, LOOP)
    return folder / "model"


def random_rows(count: int, seed: int = 0) -> list[Generation]:
    """Generations of random tokens."""
    rng = random.Random(seed)
    make = lambda low, high: [rng.randrange(VOCAB) for _ in range(rng.randint(low, high))]  # noqa: E731
    return [Generation(make(1, 9), make(2, 14), "chat", True) for _ in range(count)]


def frozen_target(folder: Path, taps) -> FrozenTarget:
    """The target in float32 as training runs it, with the states of these layers."""
    return FrozenTarget(load_target(folder, torch.float32)[0], taps, bfloat16=False)


def losses(folder: Path) -> list[float]:
    """Of every step of a run."""
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


def load(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Configuration and tensors of a checkpoint."""
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def train_command(*words: Any) -> BaseException | None:
    """What `crossspec train` ends with."""
    return CliRunner().invoke(train_app, [str(word) for word in words]).exception


def check_entry_drafter(folder: Path, **more: tuple[int, ...]) -> dict[str, Any]:
    """The tensors of EAGLE-3's format, and ``more`` of its layer, are in a checkpoint; its configuration."""
    config, tensors = load(folder)
    H, Q, KV, inner, DV = HIDDEN, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, 48, 96
    assert {name: tuple(x.shape) for name, x in tensors.items()} == {
        "fc.weight": (H, 3 * H),
        "midlayer.hidden_norm.weight": (H,),
        "midlayer.input_layernorm.weight": (H,),
        "midlayer.post_attention_layernorm.weight": (H,),
        "midlayer.self_attn.q_proj.weight": (Q, 2 * H),
        "midlayer.self_attn.k_proj.weight": (KV, 2 * H),
        "midlayer.self_attn.v_proj.weight": (KV, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, Q),
        "midlayer.mlp.gate_proj.weight": (inner, H),
        "midlayer.mlp.up_proj.weight": (inner, H),
        "midlayer.mlp.down_proj.weight": (H, inner),
        "norm.weight": (H,),
        "lm_head.weight": (DV, H),
        "d2t": (DV,),
        "t2d": (VOCAB,),
        **{f"midlayer.{name}": shape for name, shape in more.items()},
    }
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], tensors["d2t"] + torch.arange(DV))
    assert {x.dtype for name, x in tensors.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}
    return config
