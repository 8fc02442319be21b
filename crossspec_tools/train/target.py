"""The pocket target: a small Qwen3-architecture model on chat, math, code, agentic text and Python sources."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from crossspec_tools.train.blocks import replacing
from crossspec_tools.train.data import END_OF_TEXT, IM_END, Row, batches, chat_prompt, read_rows, read_texts
from crossspec_tools.train.loop import LoopConfig, Trainer
from crossspec_tools.train.tokenizer import train_tokenizer


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """Shape and diet of the target."""

    vocab_size: int = 4096  # tokens of the tokenizer, the four special ones included
    hidden_size: int = 256
    intermediate_size: int = 768
    num_layers: int = 8
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    row_tokens: int = 512  # tokens of a packed row, the longest context seen in training
    rows_per_step: int = 12  # rows of one optimizer step
    text_bytes: int = 2_500_000  # at most so many bytes of plain text (sources, documentation) beside the rows


def build_target(config: TargetConfig, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A freshly initialised target whose residual projections start small."""
    torch.manual_seed(seed)
    eos = tokenizer.convert_tokens_to_ids(IM_END)
    model_config = Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
    )
    model = Qwen3ForCausalLM(model_config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_((2 * config.num_layers) ** -0.5)
    return model


def encode_rows(tokenizer: PreTrainedTokenizerFast, rows: Sequence[Row]) -> list[list[int]]:
    """Chat-formatted documents, ending with the end of the turn and of the text."""
    texts = [chat_prompt(r.prompt) + r.response + IM_END + "\n" + END_OF_TEXT for r in rows]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def language_model_loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean next-token cross-entropy in nats; ``tokens`` int64 [rows, tokens]."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def response_losses(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, rows: Sequence[Row], max_tokens: int
) -> dict[str, float]:
    """Nats a token over the responses only, by category: {``dev_chat``: 3.1, ...}."""
    model.eval()
    sums: dict[str, list[float]] = {}
    for row in rows:
        prompt = tokenizer(chat_prompt(row.prompt), add_special_tokens=False)["input_ids"]
        response = tokenizer(row.response + IM_END, add_special_tokens=False)["input_ids"]
        tokens = torch.tensor([(prompt + response)[:max_tokens]])
        if tokens.shape[1] <= len(prompt):
            continue
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :]
        loss = F.cross_entropy(logits.float(), tokens[0, len(prompt) :], reduction="sum").item()
        total = sums.setdefault(f"dev_{row.category}", [0.0, 0.0])
        total[0] += loss
        total[1] += len(logits)
    return {key: total / count for key, (total, count) in sorted(sums.items())}


def train_target(
    data: Path, out: Path, config: TargetConfig, loop: LoopConfig, text_folders: Sequence[Path] = ()
) -> None:
    """Train tokenizer and target from ``data`` and write a Hugging Face folder (bfloat16) to ``out/model``.

    A stopped run resumes from ``out/state.pt``, with the tokenizer of its first start.
    """
    rows = read_rows(data)
    dev = read_rows(data, "dev-*.jsonl*") if list(data.glob("dev-*.jsonl*")) else []
    texts = read_texts(text_folders, (".py", ".txt", ".rst", ".md", ".gz"), config.text_bytes, loop.seed)
    tokenizer = _tokenizer(rows, texts, out, config, loop.seed)
    documents = encode_rows(tokenizer, rows)
    documents += [[*t, 0] for t in tokenizer(texts, add_special_tokens=False)["input_ids"]] if texts else []
    model = build_target(config, tokenizer, loop.seed)

    def loss_fn(_: Any, batch: Any, generator: Any) -> Any:
        return language_model_loss(model, batch), {"tokens": batch.numel()}

    def evaluate() -> Any:
        export(model, tokenizer, out / "model")
        return response_losses(model, tokenizer, dev, config.row_tokens)

    stream = batches(documents, config.row_tokens, config.rows_per_step, loop.seed)
    trainer = Trainer(model, stream, loss_fn, out, loop, evaluate if dev else None)
    trainer.run("target")
    export(model, tokenizer, out / "model")


def _tokenizer(rows: Any, texts: Any, out: Path, config: TargetConfig, seed: int) -> PreTrainedTokenizerFast:
    folder = out / "tokenizer"
    if not folder.exists():
        sample = [r.prompt + "\n" + r.response for r in rows] + list(texts)
        tokenizer = train_tokenizer(sample, config.vocab_size, seed)
        if len(tokenizer) != config.vocab_size:
            raise ValueError(f"--data gives {len(tokenizer)} tokens, not {config.vocab_size}; give more text")
        tokenizer.save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def export(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write ``model`` in bfloat16 with its tokenizer in place of ``folder``."""
    half = type(model)(model.config).to(torch.bfloat16)
    half.load_state_dict({k: v.to(torch.bfloat16) for k, v in model.state_dict().items()})
    with replacing(folder) as fresh:
        half.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
