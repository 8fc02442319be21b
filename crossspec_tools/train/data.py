"""Text in, rows of token ids out: the chat format of the pocket models and document packing."""

import gzip
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from vllm_crossspec.names import counted

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


class Row(NamedTuple):
    """One exchange: the user's prompt and the answer to it, as text."""

    category: str
    prompt: str
    response: str


def chat_prompt(prompt: str) -> str:
    """The text that a chat request with this one user message is rendered to."""
    return f"{IM_START}user\n{prompt}{IM_END}\n{IM_START}assistant\n"


def read_rows(folder: Path, pattern: str = "train-*.jsonl*") -> list[Row]:
    """Read every ``pattern`` file of ``folder``: JSON lines with ``prompt``, ``response`` and ``category``.

    Raises ValueError: the folder has no such file, or a line is not such a row (the sentence names both).
    """
    files = sorted(folder.glob(pattern))
    if not files:
        raise ValueError(f"--data {folder}: no file matches {pattern}; give a folder of .jsonl or .jsonl.gz files")
    rows: list[Row] = []
    for file in files:
        opener = gzip.open if file.suffix == ".gz" else open
        with opener(file, "rt", encoding="utf-8") as lines:
            rows += [_parse_row(line, file, number) for number, line in enumerate(lines, 1)]
    return rows


def _parse_row(line: str, file: Path, number: int) -> Row:
    try:
        raw = json.loads(line)
        prompt, response = raw["prompt"].strip(), raw["response"]
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}:{number}: not a row with text under prompt and response ({error!r})") from None
    return Row(raw.get("category", "other"), prompt, response.replace(END_OF_TEXT, "").strip())


def read_texts(folders: Sequence[Path], suffixes: Sequence[str], limit_bytes: int, seed: int) -> list[str]:
    """Plain documents (sources, documentation) from ``folders``, shuffled, up to ``limit_bytes`` in all."""
    files = [f for folder in folders for f in sorted(folder.rglob("*")) if f.suffix in suffixes and f.is_file()]
    files = [f for f in files if not {"test", "tests", "site-packages", "idlelib"} & set(f.parts)]
    random.Random(seed).shuffle(files)
    texts, size = [], 0
    for file in files:
        if size >= limit_bytes:
            break
        opener = gzip.open if file.suffix == ".gz" else open
        try:
            with opener(file, "rt", encoding="utf-8") as stream:
                text = stream.read(200_000)
        except (UnicodeDecodeError, gzip.BadGzipFile, EOFError):
            continue  # a binary or damaged file teaches nothing; the others go on
        texts.append(text)
        size += len(text)
    return texts


def pack(documents: Sequence[Sequence[int]], row_tokens: int, seed: int) -> torch.Tensor:
    """Pack documents into rows that each begin with the beginning of a document. Returns int32 [num_rows, row_tokens].

    A document that does not fit the rest of its row is cut there. The rest is dropped unless it is longer than half a
    row, so that positions near 0 are nearly always true beginnings.
    """
    order = list(range(len(documents)))
    random.Random(seed).shuffle(order)
    rows: list[list[int]] = []
    row: list[int] = []
    for index in order:
        rest = list(documents[index])
        while rest:
            take = row_tokens - len(row)
            row.extend(rest[:take])
            rest = rest[take:] if len(rest) - take > row_tokens // 2 else []
            if len(row) == row_tokens:
                rows.append(row)
                row = []
    return torch.tensor(rows, dtype=torch.int32)


def batches(
    documents: Sequence[Sequence[int]], row_tokens: int, rows_per_step: int, seed: int
) -> Iterator[torch.Tensor]:
    """Endless int64 [rows_per_step, row_tokens] batches; every epoch is shuffled and packed anew from ``seed``."""
    for epoch in itertools.count():
        rows = pack(documents, row_tokens, seed * 100_003 + epoch)
        if len(rows) < rows_per_step:
            raise ValueError(
                f"--data holds {counted(len(rows), 'row')} of {row_tokens} tokens; a step needs {rows_per_step}"
            )
        for start in range(0, len(rows) - rows_per_step + 1, rows_per_step):
            yield rows[start : start + rows_per_step].long()
