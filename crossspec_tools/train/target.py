"""The pocket target: a tokenizer and a small Qwen3-architecture model, on chat, math, code, agentic text and Python."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from crossspec_tools.train.blocks import replacing
from crossspec_tools.train.data import END_OF_TEXT, IM_END, IM_START, Row, batches, chat_prompt, read_rows, read_texts
from crossspec_tools.train.loop import Trainer
from crossspec_tools.train.recipes import LoopConfig

SPECIAL_TOKENS = [END_OF_TEXT, IM_START, IM_END, "<|mask|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Words with their leading space, single digits, runs of punctuation, and white space kept apart from line ends.
_SPLIT = r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SAMPLE_BYTES = 12_000_000
"""Most text that the tokenizer is trained on."""


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


def train_tokenizer(texts: Sequence[str], vocab_size: int, seed: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of ``vocab_size`` tokens (the special ones included), trained on a sample of ``texts``.

    It has single digits, so that arithmetic stays readable to a small model.
    """
    order = list(texts)
    random.Random(seed).shuffle(order)
    sample, size = [], 0
    for text in order:
        if size >= _SAMPLE_BYTES:
            break
        sample.append(text)
        size += len(text)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=IM_END, pad_token=END_OF_TEXT)
    fast.chat_template = CHAT_TEMPLATE
    fast.model_max_length = 2048
    return fast


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
    folder = out / "tokenizer"
    if not folder.exists():
        sample = [row.prompt + "\n" + row.response for row in rows] + texts
        tokenizer = train_tokenizer(sample, config.vocab_size, loop.seed)
        if len(tokenizer) != config.vocab_size:
            raise ValueError(f"--data gives {len(tokenizer)} tokens, not {config.vocab_size}; give more text")
        tokenizer.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    chats = [chat_prompt(row.prompt) + row.response + IM_END + "\n" + END_OF_TEXT for row in rows]
    documents = tokenizer(chats, add_special_tokens=False)["input_ids"]
    documents += [[*t, 0] for t in tokenizer(texts, add_special_tokens=False)["input_ids"]] if texts else []
    model = build_target(config, tokenizer, loop.seed)

    def loss_fn(_: Any, tokens: torch.Tensor, generator: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        return loss, {"tokens": tokens.numel()}

    def evaluate() -> Any:
        export(model, tokenizer, out / "model")
        return response_losses(model, tokenizer, dev, config.row_tokens)

    stream = batches(documents, config.row_tokens, config.rows_per_step, loop.seed)
    trainer = Trainer(model, stream, loss_fn, out, loop, evaluate if dev else None)
    trainer.run("target")
    export(model, tokenizer, out / "model")


def export(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write ``model`` in bfloat16 with its tokenizer in place of ``folder``."""
    half = type(model)(model.config).to(torch.bfloat16)
    half.load_state_dict({k: v.to(torch.bfloat16) for k, v in model.state_dict().items()})
    with replacing(folder) as fresh:
        half.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
