"""What commands print of counts and of differences: a noun agrees with its number, and only what differs is named."""

import ast
import itertools
import re
from pathlib import Path

import pytest

import vllm_crossspec
from vllm_crossspec.differences import differences
from vllm_crossspec.names import counted

ROOT = Path(vllm_crossspec.__file__).parents[1]
SOURCES = sorted(
    file
    for folder in ("vllm_crossspec", "crossspec_tools", "benchmarks/inflate")
    for file in (ROOT / folder).glob("**/*.py")
    if "tests" not in file.parts
)
COUNTED = (
    "(prompts|rows|texts|records|shards|epochs|engines|configurations|switches|rounds|tokens|numbers|calls|cores|steps)"
)
NEVER_ONE = {
    # Sizes of vocabularies and files, what is refused because it is more than one, and tokens a second or a round.
    "count", "vocab_size", "facts.vocab_size", "assets.vocab_size", "header.vocab_size", "header.order", "needed",
    "max_tokens", "length", "number", "assignments[0]", "num_candidates", "int(sizes.max())", "size", "scored",
    "self.num_query_per_req", "len(tokenizer)", "row_tokens", "config.max_prompt_tokens", "expected", "tokens_a_second",
    "num_tokens", "len(text)", "lookup.max_match", "limit",
}  # fmt: skip


def test_a_noun_agrees_with_its_number():
    assert counted(1, "prompt") == "1 prompt" and counted(0, "prompt") == "0 prompts"
    assert counted(2, "category") == "2 categories" and counted(2, "day") == "2 days"
    assert counted(3, "switch") == "3 switches" and counted(3, "prefix") == "3 prefixes"
    assert counted(3, "epoch") == "3 epochs"
    assert counted(12345, "state", ",") == "12,345 states"


def plurals(path):
    """Counts in texts that stand before a plural whatever they are."""
    for node in ast.walk(ast.parse(path.read_text())):
        parts = node.values if isinstance(node, ast.JoinedStr) else []
        for value, text in itertools.pairwise(parts):
            if isinstance(value, ast.FormattedValue) and isinstance(text, ast.Constant):
                name = ast.unparse(value.value)
                is_mean = value.format_spec is not None and "f" in ast.unparse(value.format_spec)
                found = re.match(rf" (?:new |draft |target |response )*{COUNTED}\b", text.value)
                if found and not is_mean and not name.isupper() and name not in NEVER_ONE:
                    yield f"{path.name}:{value.lineno}: {{{name}}}{text.value[:30]}"


def test_no_text_has_a_plural_of_one():
    assert [found for path in SOURCES for found in plurals(path)] == []


def test_only_what_differs_is_named():
    command = "crossspec calibrate heterospec --prompts odd.jsonl --limit {} --max-tokens {} --temperature 0.0"
    before, now = ({"seed": 1, "command": command.format(*how)} for how in ((2, 32), (3, 64)))
    assert differences(before, now) == ["--limit (2, here 3)", "--max-tokens (32, here 64)"]
    before, now = ({"spec": {"tree": {"depth": depth, "type": "dynamic"}}, "a": a} for depth, a in ((8, 1), (5, None)))
    assert differences(before, now) == ["a (1, here none)", "spec.tree.depth (8, here 5)"]
    assert differences({"x": 1}, {"x": 1}) == []
    added = differences({"command": "crossspec x --a b c"}, {"command": "crossspec x --a b --new"})
    assert added == ["--a (b c, here b)", "--new (none, here given)"]


@pytest.mark.parametrize("at", [0, 40, 100, 199])
def test_long_values_are_shown_where_they_differ(at):
    before, now = ["a" * at + end + "a" * (199 - at) for end in "xy"]
    (said,) = differences({"k": before}, {"k": now})
    assert "x" in said.replace("none", "") and "y" in said and len(said) < 160
