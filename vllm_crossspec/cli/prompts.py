"""Prompt files: JSON lines with a `prompt`, or with Spec-Bench's `turns`, and an optional `category`."""

import gzip
import json
from pathlib import Path
from typing import Any

from vllm_crossspec.cli.runner import ALL, Prompt

DEFAULT_CATEGORY = "prompts"


def read_prompts(path: Path) -> list[Prompt]:
    """Read a prompt file.

    Args:
        path: of a `.jsonl` or `.jsonl.gz` file; every row is an object with `prompt` (text) or `turns` (list of texts).

    Raises:
        ValueError: a row that cannot be used, by file and line number, or a file without rows.
        OSError: the file cannot be read.
    """
    try:
        # Not splitlines(): a text may hold U+2028 and the like.
        lines = _read(path).decode("utf-8").split("\n")
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as problem:
        raise ValueError(f"{path} is not a text file in UTF-8: save it as UTF-8 JSON lines") from problem
    prompts = [_parse(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ValueError(f"{path} holds no prompt: write one JSON object a line, with `prompt` or `turns`")
    return prompts


def _read(path: Path) -> bytes:
    content = path.read_bytes()
    return gzip.decompress(content) if path.suffix == ".gz" else content


def _parse(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as problem:
        raise ValueError(f"{where} is not JSON ({problem.msg}): write one object a line") from problem
    if not isinstance(row, dict):
        raise ValueError(f'{where} is not an object: write {{"prompt": "..."}}')
    category = row.get("category", DEFAULT_CATEGORY)
    if not isinstance(category, str) or not category or category == ALL:
        raise ValueError(f"{where}: `category` is a word other than {ALL!r}, not {category!r}")
    return Prompt(category=category, turns=_turns(row, where), where=where)


def _turns(row: dict[str, Any], where: str) -> tuple[str, ...]:
    if ("prompt" in row) == ("turns" in row):
        raise ValueError(f"{where} needs either `prompt` (a text) or `turns` (a list of texts)")
    turns = [row["prompt"]] if "prompt" in row else row["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"{where}: `prompt` is a text and `turns` a list of texts, none of them empty")
    return tuple(turns)
