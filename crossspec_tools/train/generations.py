"""The target's own responses as files of token ids: how they are written, read and put into batches."""

import gzip
import itertools
import json
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from crossspec_tools.train.stored import ReadStates, StateFile, Wanted, states_path
from vllm_crossspec.differences import differences
from vllm_crossspec.files import replacing, write_json
from vllm_crossspec.names import counted


class Generation(NamedTuple):
    """One prompt and what the target answered to it, as token ids."""

    prompt_ids: list[int]  # the rendered chat prompt
    response_ids: list[int]  # the answer, with its end-of-turn token unless it was cut at the length limit
    category: str  # of the prompt
    greedy: bool  # whether every token of the answer is the target's most likely one
    states: ReadStates | None = None  # of the target, where they are stored; not part of its line


class Batch(NamedTuple):
    """Rows of similar length, padded on the right. B rows, T tokens."""

    tokens: torch.Tensor  # int64 [B, T], 0 past the end
    starts: torch.Tensor  # int64 [B], index of the first token of the response
    ends: torch.Tensor  # int64 [B], number of tokens of prompt and response
    states: tuple[ReadStates, ...] | None = None  # of the target, if every row's are stored

    def to(self, device: torch.device) -> "Batch":
        return Batch(self.tokens.to(device), self.starts.to(device), self.ends.to(device), self.states)

    @property
    def is_asked(self) -> torch.Tensor:
        """bool [B, T]: the places whose next token is one of the response."""
        columns = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return (columns >= self.starts[:, None] - 1) & (columns < self.ends[:, None] - 1)


def at(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """x [B, T, ...] at some places of each row, int64 [B, ...]; a place outside of the row is its nearest one."""
    rows = torch.arange(len(x), device=x.device).view(-1, *[1] * (places.ndim - 1))
    return x[rows, places.clamp(0, x.shape[1] - 1)]


def write_shard(path: Path, rows: Iterable[Generation]) -> None:
    # mtime=0 keeps the bytes of equal shards equal.
    with replacing(path) as partial, gzip.GzipFile(partial, "wb", mtime=0) as stream:
        for row in rows:
            line = row._asdict()
            del line["states"]
            stream.write((json.dumps(line, separators=(",", ":")) + "\n").encode())


def read_generations(
    folder: Path, split: str, vocab_size: int, option: str = "--data", wanted: Wanted | None = None
) -> list[Generation]:
    """Rows of the shards ``<split>-*.jsonl.gz`` of a folder that have a prompt and at least two response tokens.

    With ``wanted`` the rows of shards with stored states have their places. Raises ValueError: there is no such shard,
    a line is damaged, a token does not fit the target's ``vocab_size``, or stored states are not the wanted ones.
    """
    files = sorted(folder.glob(f"{split}-*.jsonl.gz"))
    if not files:
        raise ValueError(f"{option} {folder}: no {split}-*.jsonl.gz; make them with `crossspec train generate`")
    rows: list[Generation] = []
    for file in files:
        try:
            with gzip.open(file, "rt", encoding="utf-8") as lines:
                some = [Generation(**json.loads(line)) for line in lines]
        except (OSError, EOFError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{file} is damaged ({error}); delete it and generate again") from None
        if wanted is not None and (stored := states_path(file)).is_file():
            states = StateFile(stored, wanted, [len(row.prompt_ids + row.response_ids) for row in some])
            some = [row._replace(states=partial(states.read, i)) for i, row in enumerate(some)]
        rows += some
    top = max((max(r.prompt_ids + r.response_ids, default=0) for r in rows), default=0)
    if top >= vocab_size:
        raise ValueError(
            f"{option} {folder} holds token {top}, but the target has {counted(vocab_size, 'token')}: not its responses"
        )
    rows = [r for r in rows if r.prompt_ids and len(r.response_ids) >= 2]
    if not rows:
        raise ValueError(
            f"{option} {folder}: no {split} row has a prompt and two response tokens; train the target further"
        )
    return rows


def draft_vocabulary(rows: Sequence[Generation], size: int, vocab_size: int) -> torch.Tensor:
    """The ``size`` most frequent response tokens, int64, rising. Raises ValueError where there are fewer."""
    if not 0 < size <= vocab_size:
        raise ValueError(f"--draft-vocab {size} must lie within 1..{vocab_size}")
    counts = torch.bincount(torch.tensor([t for r in rows for t in r.response_ids]), minlength=vocab_size)
    # Ties go to the lower id, so that the same responses always give the same vocabulary.
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def claim(out: Path, record: str, settings: dict[str, Any], may_change: Collection[str] = ()) -> None:
    """Mark ``out`` as the work of a run with ``settings`` (the file ``record``). Raises ValueError: it is another's.

    A run that resumes with more ``steps`` than before may have others of ``may_change``.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / record
    if path.exists():
        old = json.loads(path.read_text())
        kept = set(may_change) if settings.get("steps", 0) > old.get("steps", 0) else set()
        asked = json.loads(json.dumps(settings))
        before, now = ({key: value for key, value in one.items() if key not in kept} for one in (old, asked))
        if other := differences(before, now):
            raise ValueError(f"--out {out} is of a run with other {', '.join(other)}; give another folder or --restart")
    write_json(path, settings, indent=1)


def collate(rows: Sequence[Generation]) -> Batch:
    """Pad ``rows`` on the right into one batch."""
    sequences = [torch.tensor(r.prompt_ids + r.response_ids) for r in rows]
    states = tuple(r.states for r in rows if r.states is not None)
    return Batch(
        torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True),
        torch.tensor([len(r.prompt_ids) for r in rows]),
        torch.tensor([len(s) for s in sequences]),
        states if len(states) == len(rows) else None,
    )


def generation_batches(rows: Sequence[Generation], rows_per_step: int, seed: int) -> Iterator[Batch]:
    """Endless batches, shuffled anew each epoch; rows of a batch have similar lengths so that padding stays small."""
    if len(rows) < rows_per_step:
        raise ValueError(f"--data holds {counted(len(rows), 'row')}; one step needs {rows_per_step}: generate more")
    for epoch in itertools.count():
        rng = random.Random(seed * 100_003 + epoch)
        order = list(range(len(rows)))
        rng.shuffle(order)
        groups = []
        pool = rows_per_step * 32
        for start in range(0, len(order), pool):
            near = sorted(order[start : start + pool], key=lambda i: sum(map(len, rows[i][:2])))
            groups += [near[i : i + rows_per_step] for i in range(0, len(near) - rows_per_step + 1, rows_per_step)]
        rng.shuffle(groups)
        for group in groups:
            yield collate([rows[i] for i in group])


def sample_anchors(
    batch: Batch, first: int, count: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw ``count`` places per row where a draft could begin, without repetition, in rising order.

    A place a of a row is possible when ``starts + first <= a < ends + first - 1``: with ``first=0`` a is the token that
    the target has just emitted, with ``first=-1`` the one before it. Returns (int64 [B, count] places, bool [B, count]
    whether they are real). A row with fewer places is filled up with its first one.
    """
    device = batch.tokens.device
    columns = torch.arange(batch.tokens.shape[1], device=device)
    low, high = batch.starts + first, batch.ends + first - 1
    possible = (columns >= low[:, None]) & (columns < high[:, None])
    # Drawn on the CPU, so that a seed means the same anchors on every device.
    keys = torch.rand(possible.shape, generator=generator).to(device).masked_fill(~possible, -1.0)
    count = min(count, keys.shape[1])
    picked = keys.topk(count, dim=1)
    real = picked.values >= 0
    places = torch.where(real, picked.indices, low[:, None])
    order = places.argsort(dim=1)
    return places.gather(1, order), real.gather(1, order)
