"""The tables of `research/paper_tables.py`, as its document and its output have them."""

import contextlib
import io
import json
from typing import Any

import paper_tables


def make_table(folder: Any, *words: Any) -> tuple[list[dict[str, Any]], str]:
    """The rows of the first table that a command makes, and all that it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert paper_tables.main([*map(str, words), "--json", str(folder / "made.json")]) == 0
    tables = json.loads((folder / "made.json").read_text())["tables"]
    assert all(table["title"] in shown.getvalue() for table in tables)
    return tables[0]["rows"], shown.getvalue()


def refusal(*words: Any) -> str:
    """What a command says that makes nothing: one line."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert paper_tables.main(list(map(str, words))) == 2
    return said.getvalue()
