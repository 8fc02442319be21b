"""DART's rounds on responses, without an engine: what the drafter says at every place, and trees made of it.

A response is the target's own path: whatever a tree has of it would be accepted. The drafter says its marginals at
every place of every response once; then each tree goes through the responses round by round, all of them side by side.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from intervals import Walk
from rich.progress import Progress
from safetensors.torch import load_file
from texts import accepted, empty_tree, shortest_first

from crossspec_tools.train.dart import DartDrafter
from crossspec_tools.train.generations import Generation, collate
from crossspec_tools.train.recipes import DartConfig
from crossspec_tools.train.states import FrozenTarget
from vllm_crossspec.kinds.scoring import Scoring
from vllm_crossspec.ngram_store.store import NgramStore
from vllm_crossspec.trees.builders.continuity import ContinuityTree

ROWS_AT_ONCE = 8
TREES = {
    "continuity": Scoring(),
    # The paper's softmax, over the drafter's vocabulary; the authors' program and ours have it over the candidates.
    "continuity_whole": Scoring(renormalises=False),
    # The likeliest paths under ln p + weight * ln p_ngram; its beam is as wide as the tree.
    "best_first": Scoring(logit_decay=1.0, level_decay=0.0, renormalises=False),
}


class Places(NamedTuple):
    """Every place at which a round may begin: P of them, K drafted positions of C candidates, W tokens of context.

    Attributes:
        log_probs: float32 [P, K, C], falling along C.
        tokens: int64 [P, K, C], of the target's vocabulary.
        contexts: int64 [P, W], the last tokens before the draft, the latest last; -1 where there is none.
        truth: int64 [P, K], what the target went on with.
        first: int64 [B], the first place of each response, ``count`` [B] of them in a row.
        count: int64 [B].
        categories: of the B responses.
    """

    log_probs: torch.Tensor
    tokens: torch.Tensor
    contexts: torch.Tensor
    truth: torch.Tensor
    first: torch.Tensor
    count: torch.Tensor
    categories: list[str]


# -- the drafter ----------------------------------------------------------------------------------------------


def load_drafter(folder: Path, target: FrozenTarget) -> DartDrafter:
    """A drafter in the public format, as :func:`crossspec_tools.train.dart.checkpoint` writes it."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"--drafter {folder} has no config.json; give the folder of a DART drafter")
    settings = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    kept = tensors.pop("d2t") + torch.arange(len(tensors["lm_head.weight"]))
    is_shifted = "draft_length" in settings
    config = DartConfig(
        intermediate_size=settings["intermediate_size"],
        draft_vocab_size=len(kept),
        num_drafts=settings["draft_length"] + 1 if is_shifted else settings["num_masks"],
        is_shifted=is_shifted,
    )
    model = DartDrafter(config, target.config, kept, seed=0)
    known = model.state_dict().keys()
    model.load_state_dict({name: x for name, x in tensors.items() if name in known} | {"kept": kept})
    return model.eval()


@torch.no_grad()
def marginals(
    model: DartDrafter, target: FrozenTarget, rows: Sequence[Generation], top_k: int, width: int, progress: Progress
) -> Places:
    """Let the drafter say ``top_k`` candidates at every place of ``rows``, and keep ``width`` tokens of context.

    Rounds that would reach past a response's end have no place.
    """
    depth = model.num_drafts
    rows = shortest_first(rows)
    parts: list[tuple[torch.Tensor, ...]] = []
    bar = progress.add_task("marginals", total=len(rows))
    for begin in range(0, len(rows), ROWS_AT_ONCE):
        group = rows[begin : begin + ROWS_AT_ONCE]
        batch = collate(group)
        count = batch.ends - batch.starts - depth
        steps = torch.arange(int(count.max()))
        is_place = steps < count[:, None]
        # The token that the target has just emitted; the draft's entry stands one position before it.
        last = batch.starts[:, None] + torch.where(is_place, steps, 0)
        with target.autocast():
            logits = model(target.states(batch.tokens), batch.tokens, target.embedding, last - 1)
        log_probs, indices = likeliest(logits[is_place].float().log_softmax(-1), min(top_k, logits.shape[-1]))
        before = _around(batch.tokens, last, torch.arange(1 - width, 1))[is_place]
        after = _around(batch.tokens, last, torch.arange(1, depth + 1))[is_place]
        parts.append((log_probs, model.kept[indices], before, after, count))
        progress.advance(bar, len(group))
    *places, counts = (torch.cat(part) for part in zip(*parts, strict=True))
    return Places(*places, counts.cumsum(0) - counts, counts, [row.category for row in rows])


def likeliest(log_probs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of the last dimension, falling, the first of equals first as argmax has it, and where they are.

    Logits in bfloat16 are often equal, and which of them `topk` puts first is left open.
    """
    values, indices = log_probs.topk(count, dim=-1)
    indices, order = indices.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, indices.gather(-1, order)


def _around(tokens: torch.Tensor, places: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Tokens [B, T] at ``places`` [B, A] plus offsets [n]: [B, A, n], -1 before the beginning."""
    columns = places[..., None] + offsets
    found = tokens.gather(1, columns.clamp(0, tokens.shape[1] - 1).flatten(1)).view(columns.shape)
    return found.masked_fill(columns < 0, -1)


# -- decoding -------------------------------------------------------------------------------------------------


def walk(places: Places, draft: Callable[[torch.Tensor], torch.Tensor]) -> Walk:
    """Decode all responses side by side; ``draft`` maps places int64 [R] to accepted tokens [R]."""
    at = torch.zeros_like(places.count)
    tokens, rounds = torch.zeros_like(at), torch.zeros_like(at)
    while len(active := (at < places.count).nonzero()[:, 0]):
        emitted = draft(places.first[active] + at[active]) + 1
        at[active] += emitted
        tokens[active] += emitted
        rounds[active] += 1
    return Walk(tokens.numpy(), rounds.numpy())


def tree_walk(places: Places, kind: str, weight: float, store: NgramStore | None, options: argparse.Namespace) -> Walk:
    """Decode with trees of one kind; ``store`` is None exactly where ``weight`` is 0."""
    num_reqs, depth = len(places.count), places.truth.shape[1]
    scoring = TREES[kind]._replace(ngram_weight=weight)
    if kind != "best_first":
        scoring = scoring._replace(logit_decay=options.logit_decay, level_decay=options.level_decay)
    builder = ContinuityTree(
        num_nodes=options.nodes,
        depth=depth,
        top_k=places.tokens.shape[2],
        beam_width=options.nodes if kind == "best_first" else options.beam,
        max_num_reqs=num_reqs,
        device=torch.device("cpu"),
        scoring=scoring,
        store=store,
        backoff=options.backoff,
    )

    def draft(at: torch.Tensor) -> torch.Tensor:
        tree = empty_tree(len(at), options.nodes)
        builder.build(
            log_probs=places.log_probs[at],
            tokens=places.tokens[at],
            contexts=None if store is None else places.contexts[at],
            out=tree,
        )
        return accepted(tree, places.truth[at])

    return walk(places, draft)


def chain_walk(places: Places) -> Walk:
    """Decode with the first choices alone."""
    hits = (places.tokens[:, :, 0] == places.truth).long().cumprod(1).sum(1)
    return walk(places, lambda at: hits[at])
