"""Prompt files: our own JSON lines, and public data sets as they are published."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vllm_crossspec.cli.rows import ALL
from vllm_crossspec.cli.runner import Prompt

DEFAULT_CATEGORY = "prompts"
OWN = "prompts"

MAX_UNPACKED = 1 << 30
"""Most bytes that a compressed file may hold, which can be a thousand times as large as it."""

Row = dict[str, Any]


def read_prompts(path: Path, form: str | None = None) -> list[Prompt]:
    """The prompts of a file, as :func:`json_rows` reads it; the form is one of :data:`FORMATS`, told by its first row.

    Raises ValueError: a row that cannot be used, by file and line number, or a file without rows.
    """
    prompts = []
    for row, where in json_rows(path):
        form = form or _tell(row, where)
        prompts += FORMATS[form](row, where)
    if not prompts:
        raise ValueError(f"{path} holds no prompt: write one JSON object a line, with `prompt` or `turns`")
    return prompts


def json_rows(path: Path) -> Iterator[tuple[Row, str]]:
    """Objects of a file of JSON lines or of one JSON list (it may be compressed), and where each is from.

    Raises ValueError: what is not JSON, or not an object, by file and line number.
    """
    try:
        text = _read(path).decode("utf-8-sig")
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as problem:
        raise ValueError(f"{path} is not a text file in UTF-8: save it as UTF-8 JSON lines") from problem
    found: list[tuple[Any, str]] = []
    if text.lstrip().startswith("["):
        try:
            found = [(row, f"{path}, entry {n}") for n, row in enumerate(json.loads(text), 1)]
        except json.JSONDecodeError as problem:
            raise ValueError(f"{path}, line {problem.lineno} is not JSON ({problem.msg}): write one list") from problem
        except RecursionError:
            raise ValueError(f"{path} is JSON of too many levels: write one list of objects") from None
    else:
        # Not splitlines(): a text may hold U+2028 and the like.
        lines = [(line, f"{path}, line {n}") for n, line in enumerate(text.split("\n"), 1) if line.strip()]
        found = [(_parse(line, where), where) for line, where in lines]
    for row, where in found:
        if not isinstance(row, dict):
            raise ValueError(f'{where} is not an object: write {{"prompt": "..."}}')
        yield row, where


def parquet_rows(path: Path) -> Iterator[tuple[Row, str]]:
    """Rows of a Parquet file without their nulls, and where each is from; dates are texts.

    Where one row has a parameter, Parquet has its column in all. Raises ValueError where it is no such file.
    """
    import pyarrow
    from pyarrow import parquet

    with path.open("rb") as file:
        try:
            found = parquet.ParquetFile(file).read().to_pylist()
        except (pyarrow.ArrowException, OSError) as problem:
            said = str(problem).partition("\n")[0]
            raise ValueError(f"{path} is no Parquet file, or damaged ({said}): write it again") from None
    text = json.dumps(found, default=str)
    rows = json.loads(text, object_hook=lambda row: {key: value for key, value in row.items() if value is not None})
    yield from ((row, f"{path}, row {number}") for number, row in enumerate(rows, 1))


def _read(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    with gzip.open(path) as file:
        content = file.read(MAX_UNPACKED + 1)
    if len(content) > MAX_UNPACKED:
        raise ValueError(f"{path} holds more than {MAX_UNPACKED} bytes: unpack it, and give the file that comes out")
    return content


def _parse(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as problem:
        raise ValueError(f"{where} is not JSON ({problem.msg}): write one object a line") from problem
    except RecursionError:
        raise ValueError(f"{where} is JSON of too many levels: write one object a line") from None


MARKS = {"humaneval": "entry_point", "sharegpt": "conversations", "gsm8k": "question", "math-500": "problem"}
"""What a row has that is of this format; prompts and turns may be ours or a benchmark's."""


def _tell(row: Row, where: str) -> str:
    """The format of a file, by its first row."""
    found = [form for form, key in MARKS.items() if key in row]
    if not found or found == ["humaneval"]:
        return found[0] if found else OWN
    if len(found) > 1 or "prompt" in row or "turns" in row:
        keys = [key for key in ("prompt", "turns", *MARKS.values()) if key in row]
        has = " and ".join(f"`{key}`" for key in keys)
        raise ValueError(f"{where} has {has}: say --dataset-format, one of {', '.join(FORMATS)}")
    return found[0]


def _own(row: Row, where: str) -> list[Prompt]:
    """`prompt`, or `turns` as Spec-Bench and MT-Bench have them, and `category`."""
    category = row.get("category", DEFAULT_CATEGORY)
    if not isinstance(category, str) or not category or category == ALL:
        raise ValueError(f"{where}: `category` is a word other than {ALL!r}, not {category!r}")
    if ("prompt" in row) == ("turns" in row):
        raise ValueError(f"{where} needs either `prompt` (a text) or `turns` (a list of texts)")
    turns = [row["prompt"]] if "prompt" in row else row["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"{where}: `prompt` is a text and `turns` a list of texts, none of them empty")
    return [Prompt(category=category, turns=tuple(turns), where=where)]


def _turns_alone(row: Row, where: str) -> list[Prompt]:
    if "turns" not in row:
        raise ValueError(f"{where} needs `turns` (a list of texts), as question.jsonl has")
    return _own({name: value for name, value in row.items() if name != "prompt"}, where)


def _under(key: str, category: str) -> Callable[[Row, str], list[Prompt]]:
    """Rows with the prompt under one key, all of one category."""

    def parse(row: Row, where: str) -> list[Prompt]:
        text = row.get(key)
        if not isinstance(text, str) or not text:
            raise ValueError(f"{where} needs `{key}` (a text that is not empty), as {category} has")
        return [Prompt(category=category, turns=(text,), where=where)]

    return parse


def _sharegpt(row: Row, where: str) -> list[Prompt]:
    """The first message, if it is a person's: vLLM's benchmarks take no more of a conversation, either."""
    messages = row.get("conversations")
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("value"), str) for m in messages
    ):
        raise ValueError(f"{where} needs `conversations`, a list of messages with `from` and `value` (a text)")
    if not messages or messages[0].get("from") not in ("human", "user") or not messages[0]["value"]:
        return []
    return [Prompt(category="sharegpt", turns=(messages[0]["value"],), where=where)]


FORMATS: dict[str, Callable[[Row, str], list[Prompt]]] = {
    OWN: _own,
    "spec-bench": _turns_alone,
    "mt-bench": _turns_alone,
    "humaneval": _under("prompt", "humaneval"),
    "gsm8k": _under("question", "gsm8k"),
    "math-500": _under("problem", "math-500"),
    "sharegpt": _sharegpt,
}
"""From a row of each format to its prompts."""
