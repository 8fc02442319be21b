"""The target answers the training prompts itself: drafters learn from the very text that they will have to guess.

Prompts are answered in shards, so that a run that was stopped goes on with the first shard that is missing. Decoding
is batched over a preallocated key/value cache, and rows that have ended leave the batch.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_utils import AttentionInterface

from vllm_crossspec.training.data import IM_END, Row, chat_prompt, read_rows
from vllm_crossspec.training.generations import Generation, claim, write_shard
from vllm_crossspec.training.loop import progress_bar
from vllm_crossspec.training.states import check_target, load_target

_ATTENTION = "crossspec_grouped"


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """What is generated; two runs with equal configs, data and target write equal shards.

    Attributes:
        max_prompt_tokens: longer prompts are left out.
        max_new_tokens: a response is cut there if the target has not ended it.
        sampled_share: share of the training prompts that are answered by sampling; the rest, and all of the
            held-out ones, greedily.
        temperature: of the sampled ones.
        rows_per_batch: rows that are decoded together.
        shard_rows: prompts of one shard file.
        max_rows: at most so many training prompts (0: all).
        seed: of the order of the prompts and of the sampling.
    """

    max_prompt_tokens: int = 384
    max_new_tokens: int = 192
    sampled_share: float = 0.2
    temperature: float = 0.7
    rows_per_batch: int = 64
    shard_rows: int = 512
    max_rows: int = 0
    seed: int = 0


class _Prompt(NamedTuple):
    ids: list[int]
    category: str
    temperature: float


class _SlabLayer(DynamicLayer):
    """A cache layer that writes into a slab of fixed size instead of concatenating at every token."""

    def __init__(self, slab_tokens: int):
        super().__init__()
        self._slab_tokens = slab_tokens
        self._length = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [rows, heads, new, dim] and return everything cached so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            rows, heads, _, dim = key_states.shape
            self._slab_k = key_states.new_empty(rows, heads, self._slab_tokens, dim)
            self._slab_v = value_states.new_empty(rows, heads, self._slab_tokens, dim)
        end = self._length + key_states.shape[2]
        self._slab_k[:, :, self._length : end] = key_states
        self._slab_v[:, :, self._length : end] = value_states
        self._length = end
        self.keys, self.values = self._slab_k[:, :, :end], self._slab_v[:, :, :end]
        return self.keys, self.values

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Keep only the rows with these indices."""
        self._slab_k, self._slab_v = self._slab_k[rows], self._slab_v[rows]


def _grouped_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention whose query heads of one key/value head become query rows: nothing is repeated in memory."""
    rows, heads, length, dim = query.shape
    kv_heads = key.shape[1]
    if length == 1:
        folded = query.view(rows, kv_heads, heads // kv_heads, dim)
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
        return out.reshape(rows, 1, heads, dim), None
    key, value = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return out.transpose(1, 2), None


AttentionInterface.register(_ATTENTION, _grouped_attention)


@torch.inference_mode()
def generate_batch(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    max_new_tokens: int,
    end_id: int,
    generator: torch.Generator,
) -> list[list[int]]:
    """Answer ``prompts`` together, each until ``end_id`` (which it then includes) or ``max_new_tokens``.

    ``model`` must have been prepared by :func:`prepare_for_generation`. A temperature of 0 is greedy.
    """
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    padding = torch.tensor([width - len(p) for p in prompts])
    heat = torch.tensor(temperatures)[:, None]
    cache = Cache(layers=[_SlabLayer(width + max_new_tokens) for _ in range(model.config.num_hidden_layers)])
    visible = torch.arange(width) >= padding[:, None]
    # A padding row sees itself, for attention over nothing is not a number.
    mask = (visible[:, None] & torch.ones(width, width, dtype=torch.bool).tril()) | torch.eye(width, dtype=torch.bool)
    positions = (torch.arange(width) - padding[:, None]).clamp(min=0)
    answers: list[list[int]] = [[] for _ in prompts]
    live = list(range(len(prompts)))
    for step in range(max_new_tokens):
        inputs = {"input_ids": tokens, "position_ids": positions, "attention_mask": mask[:, None]}
        hidden = model.model(**inputs, past_key_values=cache, use_cache=True).last_hidden_state
        logits = model.lm_head(hidden[:, -1]).float()
        if heat.any():
            noise = torch.empty_like(logits).exponential_(generator=generator).clamp_(min=1e-20).log_()
            logits = logits - heat * noise
        tokens = logits.argmax(-1, keepdim=True)
        for row, token in zip(live, tokens[:, 0].tolist(), strict=True):
            if not answers[row] or answers[row][-1] != end_id:
                answers[row].append(token)
        done = torch.tensor([answers[row][-1] == end_id for row in live])
        if done.all():
            break
        if done.sum() * 5 >= len(live):  # a copy of the cache pays once a fifth of the rows has ended
            keep = (~done).nonzero()[:, 0]
            for layer in cache.layers:
                layer.keep_rows(keep)
            live = [live[i] for i in keep.tolist()]
            tokens, padding, heat = tokens[keep], padding[keep], heat[keep]
        total = width + step + 1
        mask = (torch.arange(total) >= padding[:, None])[:, None]
        positions = (total - 1 - padding)[:, None]
    return answers


def prepare_for_generation(model: PreTrainedModel) -> PreTrainedModel:
    """Set ``model`` to the attention that :func:`generate_batch` expects."""
    model.config._attn_implementation = _ATTENTION
    return model.eval()


def _prompts(tokenizer: Any, rows: Sequence[Row], config: GenerateConfig, sampled_share: float) -> list[_Prompt]:
    rng = random.Random(config.seed)
    encoded = tokenizer([chat_prompt(r.prompt) for r in rows], add_special_tokens=False)["input_ids"]
    prompts = [
        _Prompt(ids, row.category, config.temperature if rng.random() < sampled_share else 0.0)
        for ids, row in zip(encoded, rows, strict=True)
        if len(ids) <= config.max_prompt_tokens
    ]
    rng.shuffle(prompts)
    return prompts


def _answer_shard(model: Any, prompts: Sequence[_Prompt], config: GenerateConfig, end_id: int, seed: int) -> Any:
    """Answer one shard; prompts of similar length are decoded together, the order of the shard is kept."""
    generator = torch.Generator().manual_seed(seed)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
    found: dict[int, Generation] = {}
    for start in range(0, len(order), config.rows_per_batch):
        chosen = order[start : start + config.rows_per_batch]
        group = [prompts[i] for i in chosen]
        ids, temperatures = [p.ids for p in group], [p.temperature for p in group]
        answers = generate_batch(model, ids, temperatures, config.max_new_tokens, end_id, generator)
        for index, prompt, answer in zip(chosen, group, answers, strict=True):
            found[index] = Generation(prompt.ids, answer, prompt.category, prompt.temperature == 0.0)
    return [found[i] for i in range(len(prompts))]


class _Job(NamedTuple):
    """One shard to write."""

    path: Path
    prompts: list[_Prompt]
    seed: int


def generate(data: Path, target: Path, out: Path, config: GenerateConfig, *, workers: int = 1, threads: int = 0) -> int:
    """Answer the prompts of ``data`` with ``target``; write ``train-*.jsonl.gz`` and ``dev-*.jsonl.gz`` to ``out``.

    Args:
        workers: processes that share the shards; the shards do not depend on it.
        threads: of each process (0: what torch chooses).

    Returns:
        The number of response tokens written in this run (0 when every shard was already there).

    Raises:
        ValueError: no rows, no target, or ``out`` holds shards of other settings.
    """
    splits = {"train": read_rows(data)}
    if list(data.glob("dev-*.jsonl*")):
        splits["dev"] = read_rows(data, "dev-*.jsonl*")
    check_target(target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    end_id = tokenizer.get_vocab().get(IM_END)
    if end_id is None:
        raise ValueError(f"--target {target}: its tokenizer has no {IM_END}; give a ChatML target")
    jobs = _jobs(tokenizer, splits, data, out, config)
    claim(out, "generate.json", asdict(config) | {"target": str(target.resolve())})
    missing = [job for job in jobs if not job.path.exists()]
    write = partial(_write, target=target, config=config, end_id=end_id, threads=threads)
    total = 0
    with progress_bar() as progress:
        task = progress.add_task("generate", total=len(jobs), completed=len(jobs) - len(missing))
        for tokens in _run_jobs(missing, write, min(workers, len(missing))):
            total += tokens
            progress.update(task, advance=1, description=f"generate  {total} tokens")
    return total


def _run_jobs(jobs: Sequence[_Job], write: Callable[[_Job], int], workers: int) -> Iterator[int]:
    """Write every shard, in this process or in ``workers`` of them; yields the response tokens of each."""
    if workers <= 1:
        yield from map(write, jobs)
        return
    with torch.multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap_unordered(write, jobs)


@lru_cache(maxsize=1)
def _generator_model(target: Path) -> PreTrainedModel:
    return prepare_for_generation(load_target(target, torch.bfloat16)[0])


def _write(job: _Job, *, target: Path, config: GenerateConfig, end_id: int, threads: int) -> int:
    """Write one shard; a process loads the model at its first one and keeps it."""
    if threads:
        torch.set_num_threads(threads)
    rows = _answer_shard(_generator_model(target), job.prompts, config, end_id, job.seed)
    write_shard(job.path, rows)
    return sum(len(row.response_ids) for row in rows)


def _jobs(tokenizer: Any, splits: dict[str, list[Row]], data: Path, out: Path, config: GenerateConfig) -> list[_Job]:
    jobs = []
    for split, rows in sorted(splits.items()):
        prompts = _prompts(tokenizer, rows, config, config.sampled_share if split == "train" else 0.0)
        if split == "train" and config.max_rows:
            prompts = prompts[: config.max_rows]
        if not prompts:
            raise ValueError(f"--data {data}: no {split} prompt has at most {config.max_prompt_tokens} tokens")
        for number, start in enumerate(range(0, len(prompts), config.shard_rows)):
            path = out / f"{split}-{number:05d}.jsonl.gz"
            chosen = prompts[start : start + config.shard_rows]
            jobs.append(_Job(path, chosen, config.seed * 1_000_003 + number))
    return jobs
