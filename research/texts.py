"""The responses that everything here decodes, the target that gave them, and figures by their category."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from intervals import Interval, Walk, rate

from crossspec_tools.train.generations import Generation, read_generations
from crossspec_tools.train.states import FrozenTarget, load_target
from vllm_crossspec.drafters.eagle3.checkpoint import default_target_layers
from vllm_crossspec.pocket_models import find_pocket
from vllm_crossspec.types import TokenTree

POCKET = find_pocket()


def add_responses(parser: ArgumentParser) -> None:
    """Options that say which responses count."""
    add = parser.add_argument
    add("--responses", type=Path, required=True, help="folder that `crossspec train generate` wrote for this target")
    add("--split", default="dev", help="its shards SPLIT-*.jsonl.gz")
    add("--rows", type=int, help="at most so many responses")


def add_target(parser: ArgumentParser) -> None:
    """The same, and whose responses they are."""
    add_responses(parser)
    parser.add_argument("--target", type=Path, default=POCKET / "target", help="folder of the target")


def read_texts(options: Namespace, vocab_size: int, least: int = 0, sampled: bool = False) -> list[Generation]:
    """Responses of more than ``least`` tokens, greedy or sampled ones. Raises ValueError without any."""
    rows = read_generations(options.responses, options.split, vocab_size, option="--responses")
    rows = [row for row in rows if row.greedy != sampled and len(row.response_ids) > least][: options.rows]
    if not rows:
        kind = "sampled" if sampled else "greedy"
        folder = f"--responses {options.responses}"
        raise ValueError(f"{folder}: no {kind} response of {options.split} has over {least} tokens")
    return rows


def shortest_first(rows: Sequence[Generation]) -> list[Generation]:
    """Texts of like length beside each other, which are decoded together."""
    return sorted(rows, key=lambda row: len(row.prompt_ids) + len(row.response_ids))


def open_target(folder: Path, bfloat16: bool = False) -> FrozenTarget:
    """The target with the states that drafters read; computes in float32 or under bfloat16 autocast."""
    causal_lm, _ = load_target(folder, torch.float32)
    return FrozenTarget(causal_lm, default_target_layers(causal_lm.config.num_hidden_layers), bfloat16)


def by_category(result: Walk, categories: Sequence[str]) -> dict[str, Interval]:
    """Tokens a round over all texts, then over those of each category."""
    names = np.array(categories)
    parts = {name: rate(result.of(names == name)) for name in sorted(set(categories))}
    return {"all": rate(result), **parts}


def empty_tree(num_reqs: int, num_nodes: int) -> TokenTree:
    return TokenTree(
        torch.zeros(num_reqs, num_nodes, dtype=torch.int64),
        torch.zeros(num_reqs, num_nodes, dtype=torch.int32),
        torch.zeros(num_reqs, num_nodes),
        torch.zeros(num_reqs, dtype=torch.int32),
    )


def accepted(tree: TokenTree, truth: torch.Tensor) -> torch.Tensor:
    """How many tokens of ``truth`` int64 [R, K] the trees have as a path from the root: int64 [R]."""
    num_reqs, num_nodes = tree.tokens.shape
    is_live = torch.arange(num_nodes) < tree.sizes[:num_reqs, None]
    at, length = torch.zeros(num_reqs, dtype=torch.int64), torch.zeros(num_reqs, dtype=torch.int64)
    goes_on = torch.ones(num_reqs, dtype=torch.bool)
    for token in truth.unbind(1):
        is_next = is_live & (tree.parents == at[:, None]) & (tree.tokens == token[:, None])
        goes_on = goes_on & is_next.any(1)
        at = torch.where(goes_on, is_next.int().argmax(1) + 1, at)
        length += goes_on
    return length
