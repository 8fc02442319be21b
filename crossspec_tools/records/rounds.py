"""Records of verified trees: what HeteroSpec's bins are fitted to (HeteroSpec, section 4.2).

``crossspec calibrate heterospec`` writes them (``records.shards``); a shard has the rounds of some prompts.
Shape legend: M rounds, D deepest level, N draft nodes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from crossspec_tools.records.shards import Steps, joined_steps, read_shards
from crossspec_tools.records.shards import write_shard as write_file
from crossspec_tools.train.records import Answer
from vllm_crossspec.heterospec.calibration import TreeShape
from vllm_crossspec.kinds.identity import Identity

INDEX_FILE = "rounds.json"
NAMES = ("phi", "path", "depth", "size", "text")


class RoundsFacts(NamedTuple):
    """What all shards of a folder have in common: the models and the tree."""

    target: Identity
    drafter: Identity
    tree: TreeShape


class Rounds(NamedTuple):
    """What became of every drafted tree, in the order of texts and, within a text, of time."""

    phi: torch.Tensor  # float32 [M] of the tree, nats (HeteroSpec, equation 1)
    # uint8 [M, D] rows of the accepted nodes, falling in probability down the path; 0 past them. Nodes are in rank
    # order, so row r is the r-th most probable node of its tree.
    path: torch.Tensor
    depth: torch.Tensor  # int16 [M] of the tree's deepest node
    size: torch.Tensor  # int16 [M] nodes of the tree
    text: torch.Tensor  # int32 [M] number of the text
    categories: dict[int, str]  # of each text, by its number
    facts: RoundsFacts  # what drafted them

    @property
    def accepted(self) -> torch.Tensor:
        """int64 [M] accepted draft tokens."""
        return (self.path > 0).sum(dim=1)

    @property
    def rank(self) -> torch.Tensor:
        """int64 [M] terminal confidence rank (section 3.2): of the deepest accepted node, from 1; 0 without one."""
        return self.path.amax(dim=1).long()

    def accepted_within(self, widths: torch.Tensor) -> torch.Tensor:
        """int64 [M] draft tokens that had been accepted of the first ``widths`` [M] nodes of each tree alone."""
        return ((self.path > 0) & (self.path <= widths[:, None])).sum(dim=1)


def assemble(steps: Steps, answers: Mapping[int, Answer], depth: int) -> dict[str, torch.Tensor]:
    """The tensors of a shard from what the engine recorded. Raises ValueError: there is not one round.

    A round that reaches past the end of its text is left out: it accepted more than was asked for.
    """
    numbers, data = joined_steps(steps)
    if not data:
        raise ValueError("these prompts were answered without a single draft: give shorter ones, or longer answers")
    order = numbers.argsort(stable=True)
    numbers = numbers[order]
    length = torch.zeros(max(answers) + 1, dtype=torch.int64)
    for number, answer in answers.items():
        length[number] = len(answer.token_ids)
    # A text's first token is its prompt's; each round then adds what it sampled.
    ends = data["num_sampled"][order].long().cumsum(0)
    starts = torch.cat([torch.ones(1, dtype=torch.bool), numbers[1:] != numbers[:-1]])
    counts = torch.unique_consecutive(numbers, return_counts=True)[1]
    before = (ends - data["num_sampled"][order])[starts].repeat_interleave(counts)
    inside = 1 + ends - before <= length[numbers]
    data = {name: tensor[order[inside]] for name, tensor in data.items()}
    # The walk's rows [M, D + 1]: the first is the root's, the last may be old.
    is_draft = torch.arange(1, depth + 1) < data["num_sampled"][:, None]
    return {
        "phi": data["phi"].float(),
        "path": data["path"][:, 1 : depth + 1].masked_fill(~is_draft, 0).to(torch.uint8),
        "depth": _deepest(data["parents"], data["size"]).to(torch.int16),
        "size": data["size"].to(torch.int16),
        "text": numbers[inside].to(torch.int32),
    }


def _deepest(parents: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """int64 [M] depth of the deepest live node of trees [M, N] whose parents have smaller rows."""
    num_rounds, num_nodes = parents.shape
    depths = torch.zeros(num_rounds, num_nodes + 1, dtype=torch.int64)
    for node in range(num_nodes):
        above = depths.gather(1, parents[:, node : node + 1].long())[:, 0]
        depths[:, node + 1] = torch.where(node < sizes, above + 1, 0)
    return depths.amax(dim=1)


def _facts(found: Sequence[Mapping[str, Any]]) -> RoundsFacts:
    target, drafter, tree = found
    return RoundsFacts(Identity(**target), Identity(**drafter), TreeShape(**tree))


def write_shard(
    path: Path, tensors: Mapping[str, torch.Tensor], answers: Mapping[int, Answer], facts: RoundsFacts
) -> None:
    """Write a shard whole or not at all."""
    texts = [[number, answer.category, len(answer.token_ids)] for number, answer in sorted(answers.items())]
    write_file(path, {name: tensors[name] for name in NAMES}, [part._asdict() for part in facts], texts)


def read_rounds(folder: Path, key: str = "--records") -> Rounds:
    """All finished shards of a folder.

    Raises ValueError: no such folder, no rounds in it, a damaged shard, or shards of different models or trees.
    """
    facts, shards = read_shards(folder / INDEX_FILE, key, "calibrate heterospec", NAMES, _facts)
    categories = {int(number): str(category) for shard in shards for number, category, _ in shard.texts}
    phi, path, depth, size, text = (torch.cat([shard.tensors[name] for shard in shards]) for name in NAMES)
    return Rounds(phi, path, depth, size, text, categories, facts)
