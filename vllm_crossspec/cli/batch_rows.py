"""What `crossspec batch` is asked: rows of JSON lines, of Parquet, or of OpenAI's batch format, as one kind of request.

A request is a dictionary that :mod:`vllm_crossspec.engine.jobs.batch` reads. What is wrong with a file (a column that
nobody knows, a row without a prompt) is said here, before anything starts; what is wrong with one row's parameters only
its engine finds out, and it becomes the row's error.
"""

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from vllm_crossspec.cli.prompts import json_rows
from vllm_crossspec.names import nearest

SAMPLING = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids",
    "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "bad_words", "structured_outputs",
    "extra_args",
)  # fmt: skip
"""Columns that are sampling parameters of vLLM's; `sampling` may hold any of them."""

PROMPTS = ("prompt", "messages")
COLUMNS = ("id", *PROMPTS, "sampling", *SAMPLING)
OPENAI_COLUMNS = ("custom_id", "method", "url", "body")
URLS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
"""Of OpenAI's rows, and what a body of each asks with."""

Request = dict[str, Any]


def read_requests(path: Path, keep: Collection[str] = ()) -> list[Request]:
    """All rows of a file, in its order.

    Args:
        path: of Parquet (`.parquet`), else of JSON lines, which may be compressed (`.gz`).
        keep: columns that are handed on to the output as they are.

    Returns:
        Requests: ``row`` (its number, from 0), ``id``, ``kept``, ``prompt`` (a text or token ids) or ``messages``,
        ``sampling``, ``raw`` (whether the prompt is never put into a chat template) and ``url`` (None: a row of ours).

    Raises:
        ValueError: one sentence with file and row: nothing to read, a row without a prompt, an unknown column, an id
            that is there twice.
        OSError: the file cannot be read.
    """
    rows = _parquet_rows(path) if path.suffix == ".parquet" else json_rows(path)
    requests: list[Request] = []
    seen: dict[Any, str] = {}
    for number, (row, where) in enumerate(rows):
        request = _openai(row, where) if "custom_id" in row else _own(row, where, keep)
        if requests and (request["url"] is None) != (requests[0]["url"] is None):
            raise ValueError(f"{where}: rows of OpenAI's batch format and others do not go together: split the file")
        key = "id" if request["url"] is None else "custom_id"
        if not isinstance(request["id"], str | int | float | None):
            raise ValueError(f"{where}: `{key}` must be a text or a number, not {request['id']!r}")
        if request["id"] is not None and (first := seen.setdefault(request["id"], where)) != where:
            raise ValueError(f"{where}: `{key}` {request['id']!r} is that of {first}, too: give each row its own")
        requests.append({"row": number, **request})
    if not requests:
        raise ValueError(f"{path} holds no row: write one JSON object a line, with `prompt` or `messages`")
    return requests


def _parquet_rows(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Rows without their nulls (where one row has a parameter, Parquet has the column in all); dates are texts."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        problem = f'{path}: to read Parquet needs pyarrow: run `pip install "vllm-crossspec[ray]"`, or give JSON lines'
        raise ValueError(problem) from None

    with path.open("rb") as file:
        try:
            batches = parquet.ParquetFile(file).iter_batches()
            found = [row for batch in batches for row in batch.to_pylist()]
        except (pyarrow.ArrowException, OSError) as problem:
            said = str(problem).partition("\n")[0]
            raise ValueError(f"{path} is no Parquet file, or damaged ({said}): write it again") from None
    for number, row in enumerate(found, 1):
        yield json.loads(json.dumps(_without_nulls(row), default=str)), f"{path}, row {number}"


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _own(row: dict[str, Any], where: str, keep: Collection[str]) -> Request:
    for column in row:
        if column not in COLUMNS and column not in keep:
            hint = nearest(column, COLUMNS)
            raise ValueError(f"{where}: no column is called `{column}`{hint}; --keep {column} would hand it on to OUT")
    sampling = row.get("sampling", {})
    if not isinstance(sampling, dict):
        raise ValueError(f'{where}: `sampling` must be an object, like {{"temperature": 0.7}}')
    return {
        "id": row.get("id"),
        "kept": {column: row.get(column) for column in keep},
        **_asked(row, where, PROMPTS),
        "sampling": {**sampling, **{name: row[name] for name in SAMPLING if name in row}},
        "raw": False,
        "url": None,
    }


def _openai(row: dict[str, Any], where: str) -> Request:
    for column in row:
        if column not in OPENAI_COLUMNS:
            known = nearest(column, OPENAI_COLUMNS)
            raise ValueError(f"{where}: OpenAI's batch format has no `{column}`{known}")
    url, body = row.get("url"), row.get("body")
    if row.get("method", "POST") != "POST" or not isinstance(url, str) or url not in URLS:
        raise ValueError(f"{where}: `url` is {url!r}: write POST and one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise ValueError(f"{where} needs `body`, an object with `{URLS[url]}`")
    asked = _asked(body, f"{where}, `body`", (URLS[url],))
    rest = {name: value for name, value in body.items() if name not in asked and name != "model" and value is not None}
    return {"id": row["custom_id"], "kept": {}, **asked, "sampling": rest, "raw": True, "url": url}


def _asked(row: dict[str, Any], where: str, keys: Collection[str]) -> dict[str, Any]:
    """The prompt or the messages."""
    given = [key for key in keys if row.get(key)]
    if len(given) != 1:
        what = " or ".join(f"`{key}`" for key in keys)
        raise ValueError(f"{where} needs {what}, not empty{', and not both' if given else ''}")
    key, value = given[0], row[given[0]]
    part = int if key == "prompt" else dict
    if not (key == "prompt" and isinstance(value, str)) and not (
        isinstance(value, list) and all(isinstance(one, part) for one in value)
    ):
        shape = "a text, or a list of token ids" if key == "prompt" else 'a list of {"role": ..., "content": ...}'
        raise ValueError(f"{where}: `{key}` must be {shape}")
    return {key: value}
