"""What trees and chains of every size get at every place of held-out responses: the records of HeteroSpec's tables.

    python research/heterospec_offline.py --responses work/responses --out work/trees      # the pocket's EAGLE-3
    python research/heterospec_offline.py --responses work/sampled --split train --sampled --out work/trees-t1

A response is the target's own path: whatever a draft has of it would be accepted. At every place one large tree is
grown, which holds every smaller one, and the ranks of the response's own tokens in it are kept. Beside it stands a
chain of first choices, with the entropies by which AdaEDL (Agrawal et al. 2024) stops and the probabilities of the
choices. A stopped run resumes with the next shard.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from confu_offline import Group, Round, load_control
from rich.console import Console
from rich.progress import Progress
from texts import POCKET, add_target, open_target, read_texts, shortest_first

from crossspec_tools.records.shards import read_shards, shard_path, shard_paths, write_shard
from crossspec_tools.train.eagle3 import Eagle3Drafter
from crossspec_tools.train.generations import Generation
from crossspec_tools.train.records import claim
from crossspec_tools.train.states import FrozenTarget, target_settings
from vllm_crossspec.heterospec import naive
from vllm_crossspec.heterospec.calibration import TreeShape
from vllm_crossspec.heterospec.heterospec import default_alpha
from vllm_crossspec.kinds.identity import Identity, identify
from vllm_crossspec.kinds.tree import tree_kind
from vllm_crossspec.trees.builders.dynamic import DynamicTree

INDEX_FILE = "trees.json"
SHARD_TEXTS, PLACES_AT_ONCE = 8, 64
NAMES = ("ranks", "phi", "log_probs", "entropies", "chain", "chain_entropies", "chain_confidences")
DEFAULTS = tree_kind("dynamic", "tree.type").defaults


class Facts(NamedTuple):
    """What drafted: the models, the tree of the base method, and how deep the recorded ones are."""

    target: Identity
    drafter: Identity
    tree: TreeShape
    levels: int
    sampled: bool


class Records(NamedTuple):
    """Every place at which a round may begin; P places of B texts, D levels, N nodes.

    Attributes:
        ranks: int16 [P, D, D]: ``[p, l, d]`` is the rank, from 1, of the text's own token l + 1 places ahead among all
            candidates of the levels up to d + 1; 0 if it is not a candidate.
        phi: float32 [P] of the base tree (HeteroSpec, equation 1), nats.
        log_probs: float32 [P, N] of the base tree's paths, falling.
        entropies: float32 [P, D] of the drafter's distribution behind the likeliest node of each level, nats, over its
            whole vocabulary and not sharpened.
        chain: int16 [P], how many first choices in a row are the text's own tokens.
        chain_entropies, chain_confidences: float32 [P, D] of the distributions and the choices, not sharpened.
        counts: int64 [B] places of each text, one after another: its tokens but the first.
    """

    ranks: np.ndarray
    phi: np.ndarray
    log_probs: np.ndarray
    entropies: np.ndarray
    chain: np.ndarray
    chain_entropies: np.ndarray
    chain_confidences: np.ndarray
    counts: np.ndarray
    categories: list[str]
    facts: Facts

    @property
    def firsts(self) -> np.ndarray:
        """int64 [B], the first place of each text."""
        return np.asarray(self.counts.cumsum() - self.counts)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_target(parser)
    add("--sampled", action="store_true", help="only sampled responses count; trees then are not sharpened")
    add("--out", type=Path, required=True, help="folder of the records; where a stopped run goes on")
    add("--drafter", type=Path, default=POCKET / "eagle3", help="folder of the EAGLE-3 drafter")
    add("--depth", type=int, default=DEFAULTS["depth"], help="levels of the base tree")
    add("--top-k", type=int, default=DEFAULTS["top_k"], help="nodes of a level that are expanded, and children of each")
    add("--nodes", type=int, default=DEFAULTS["num_nodes"], help="of the base tree")
    add("--sharpness", type=float, help="of the trees. Default: as the engine's, 1 for sampled responses")
    add("--levels", type=int, help="to grow. Default: the depth, half of it (the paper's alpha), and one")
    options = parser.parse_args(argv)
    options.levels = options.levels or options.depth + default_alpha(options.depth) + 1
    if options.sharpness is None:
        options.sharpness = 1.0 if options.sampled else DEFAULTS["sharpness"]
    if not 1 <= options.depth <= options.levels:
        parser.error(f"--levels {options.levels}: at least --depth, which is {options.depth}")
    if not 1 <= options.nodes <= options.top_k + (options.depth - 1) * options.top_k**2:
        parser.error(f"--nodes {options.nodes}: a tree of these --depth and --top-k has not so many")
    return options


# -- recording ------------------------------------------------------------------------------------------------


class Places(Round):
    """A round at each of R places, which may be places of one text; the model's head has ``sharpness``."""

    def __init__(self, group: Group, text: torch.Tensor, place: torch.Tensor, sharpness: float):
        super().__init__(group, text, place, torch.full_like(place, -1))
        self.sharpness = sharpness

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """The drafter's [R, V] in states [R, H], not sharpened."""
        model = self.group.model
        return model.lm_head(model.norm(states)) / self.sharpness

    def tree(self, truth: torch.Tensor, base: TreeShape) -> tuple[torch.Tensor, ...]:
        """Grow one tree at each place, and find the text in it.

        Args:
            truth: int64 [R, D], what the text goes on with, -1 past its end; D levels are grown.
            base: the base tree.

        Returns:
            ``ranks``, ``phi``, ``log_probs`` and ``entropies`` of :class:`Records`, for these places.
        """
        num_reqs, levels = truth.shape
        top_k = base.top_k
        builder = DynamicTree(num_nodes=1, depth=levels, top_k=top_k, max_num_reqs=num_reqs, device=torch.device("cpu"))
        # Of the text's path: its candidates (-1: there is none) and its node in the beam.
        found, at = torch.full((num_reqs, levels), -1), torch.zeros(num_reqs, dtype=torch.int64)
        on_path, rows = torch.ones(num_reqs, dtype=torch.bool), torch.arange(num_reqs)
        masks = torch.zeros(num_reqs, 1, 0, dtype=torch.bool)
        nodes, states, entropies = self.root[:, None], self.root_state[:, None], []
        for level in range(levels):
            log_probs, tokens, states = self._level(level, nodes, states, masks, top_k)
            entropies.append(naive.entropy(self._logits(states[:, 0])))
            is_next = (tokens[rows, at] == truth[:, level, None]) & on_path[:, None]
            on_path = is_next.any(1)
            first = top_k + (level - 1) * top_k**2 if level else 0
            candidate = first + at * top_k + is_next.int().argmax(1)
            found[:, level] = torch.where(on_path, candidate, -1)
            if level == 0:
                beam = builder.start(log_probs[:, 0], tokens[:, 0])
                states = states.expand(-1, top_k, -1)
            else:
                beam = builder.expand(level + 1, log_probs, tokens)
            is_node = (beam.parents == at[:, None]) & (beam.tokens == truth[:, level, None]) & on_path[:, None]
            on_path, at = is_node.any(1), is_node.int().argmax(1)
            bits = torch.arange((level + 1) * top_k)
            masks = (beam.masks[..., bits // 32] >> (bits % 32)) & 1 > 0
            nodes = beam.tokens
            states = states.gather(1, beam.parents.long()[..., None].expand(-1, -1, states.shape[-1]))
        grown = builder.grown()
        of_base = grown._replace(log_probs=grown.log_probs[:, : top_k + (base.depth - 1) * top_k**2])
        best = of_base.log_probs.topk(base.num_nodes).values
        return ranks_of(grown.log_probs, found, top_k), phi_of(of_base, base.depth), best, torch.stack(entropies, 1)

    def first_choices(self, truth: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The three ``chain`` parts of :class:`Records`, for these places; ``truth`` as of :meth:`tree`."""
        num_reqs, levels = truth.shape
        token, states = self.root[:, None], self.root_state[:, None]
        hits, entropies, confidences = [], [], []
        for level in range(levels):
            masks = torch.ones(num_reqs, 1, level, dtype=torch.bool)
            _, tokens, states = self._level(level, token, states, masks, 1)
            token = tokens[:, 0]
            hits.append(token[:, 0] == truth[:, level])
            logits = self._logits(states[:, 0])
            entropies.append(naive.entropy(logits))
            confidences.append(logits.softmax(-1).amax(-1))
        return torch.stack(hits, 1).long().cumprod(1).sum(1), torch.stack(entropies, 1), torch.stack(confidences, 1)


def ranks_of(log_probs: torch.Tensor, found: torch.Tensor, top_k: int) -> torch.Tensor:
    """int64 [R, D, D] ranks of :class:`Records`; of equals the earlier candidate is first, as the trees have it.

    Args:
        log_probs: float32 [R, C] of all candidates of D levels.
        found: int64 [R, D], the candidate of each level that is asked about, or -1.
        top_k: candidates of level 1; its square are those of every further one.
    """
    levels = found.shape[1]
    ends = torch.tensor([top_k + level * top_k**2 for level in range(levels)]) - 1
    order, ranks = torch.arange(log_probs.shape[1]), []
    for level, candidate in enumerate(found.unbind(1)):
        own = log_probs.gather(1, candidate.clamp(min=0)[:, None])
        is_ahead = (log_probs > own) | ((log_probs == own) & (order < candidate[:, None]))
        rank = 1 + is_ahead.long().cumsum(1)[:, ends]
        never = (candidate[:, None] < 0) | (torch.arange(levels) < level)
        ranks.append(rank.masked_fill(never, 0))
    return torch.stack(ranks, 1)


def phi_of(grown: Any, depth: int) -> torch.Tensor:
    """float32 [R] Phi over ``depth`` levels, nats; ``grown`` has their log-probabilities."""
    num_reqs = len(grown.log_probs)
    phi, others = torch.zeros(num_reqs), torch.zeros(num_reqs, dtype=torch.int32)
    one = torch.zeros(1, dtype=torch.int32)
    written = {"bins": others, "limits": others.clone(), "caps": others.clone()}
    policy = {"thresholds": torch.zeros(0), "extensions": one, "widths": one}
    naive.assess(grown=grown, levels=depth, phi=phi, **policy, **written)
    return phi


@torch.no_grad()
def record(
    model: Eagle3Drafter, target: FrozenTarget, rows: list[Generation], tree: TreeShape, levels: int
) -> dict[str, torch.Tensor]:
    """The tensors of :class:`Records`, of the places of ``rows``; the model's head is sharpened as ``tree`` says."""
    group = Group(model, target, rows, futures=False)
    batch, parts = group.batch, []
    counts = batch.ends - batch.starts - 1
    text = torch.arange(len(rows)).repeat_interleave(counts)
    place = batch.starts[text] - 1 + torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts)[text]
    for some in torch.arange(len(text)).split(PLACES_AT_ONCE):
        columns = place[some, None] + 2 + torch.arange(levels)
        past = columns >= batch.ends[text[some], None]
        truth = batch.tokens[text[some, None], columns.clamp(max=batch.tokens.shape[1] - 1)].masked_fill(past, -1)
        tree_parts = Places(group, text[some], place[some], tree.sharpness).tree(truth, tree)
        chain_parts = Places(group, text[some], place[some], tree.sharpness).first_choices(truth)
        parts.append((*tree_parts, *chain_parts))
    tensors = dict(zip(NAMES, (torch.cat(part) for part in zip(*parts, strict=True)), strict=True))
    return tensors | {name: tensors[name].to(torch.int16) for name in ("ranks", "chain")}


def collect(options: argparse.Namespace, progress: Progress) -> None:
    """Write the shards that are missing."""
    tree = TreeShape(options.depth, options.top_k, options.nodes, options.sharpness)
    target_facts, drafter_facts = identify(str(options.target), "--target"), identify(str(options.drafter), "--drafter")
    facts = Facts(target_facts, drafter_facts, tree, options.levels, options.sampled)
    # Texts of like length together; of each kind every other one is of the same half.
    rows = shortest_first(read_texts(options, target_settings(options.target).vocab_size, sampled=options.sampled))
    target = open_target(options.target)
    model = load_control(options.drafter, target)
    model.lm_head.weight.mul_(tree.sharpness)
    settings = dict(zip(Facts._fields, _json(facts), strict=True)) | {"split": options.split, "rows": len(rows)}
    claim(options.out, settings, INDEX_FILE, "--out")
    bar = progress.add_task("responses", total=len(rows))
    for number, begin in enumerate(range(0, len(rows), SHARD_TEXTS)):
        some = rows[begin : begin + SHARD_TEXTS]
        if not shard_path(options.out, number).exists():
            tensors = record(model, target, some, tree, options.levels)
            texts = [[begin + i, row.category, len(row.response_ids) - 1] for i, row in enumerate(some)]
            write_shard(shard_path(options.out, number), tensors, _json(facts), texts)
        progress.advance(bar, len(some))


def _json(facts: Facts) -> list[Any]:
    return [part._asdict() if hasattr(part, "_asdict") else part for part in facts]


def _facts(content: list[Any]) -> Facts:
    target, drafter, tree, levels, sampled = content
    return Facts(Identity(**target), Identity(**drafter), TreeShape(**tree), levels, sampled)


def read(folder: Path, key: str = "--records") -> Records:
    """The records of a folder.

    Raises:
        ValueError: one sentence: no such folder, a damaged shard, or a run that has not ended.
    """
    command = "python research/heterospec_offline.py"
    index = folder / INDEX_FILE
    if not index.is_file() or not shard_paths(folder):
        raise ValueError(f"{key} {folder} holds no records; give the --out of `{command}`")
    facts, shards = read_shards(index, key, command, NAMES, _facts)
    texts = [text for shard in shards for text in shard.texts]
    if len(texts) < (wanted := json.loads(index.read_text())["rows"]):
        raise ValueError(f"{key} {folder} holds {len(texts)} of {wanted} texts; let `{command}` go on")
    tensors = {name: np.asarray(torch.cat([shard.tensors[name] for shard in shards]).numpy()) for name in NAMES}
    counts = np.array([count for _, _, count in texts], dtype=np.int64)
    return Records(**tensors, counts=counts, categories=[category for _, category, _ in texts], facts=facts)


def main(argv: Sequence[str] | None = None) -> int:
    """Record; 2 for what cannot be recorded."""
    options = arguments(argv)
    console = Console(stderr=True)
    try:
        with torch.no_grad(), Progress(console=console) as progress:
            collect(options, progress)
            found = read(options.out, "--out")
    except ValueError as problem:
        console.print(str(problem), highlight=False)
        return 2
    print(f"{len(found.phi)} places of {len(found.counts)} texts in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
