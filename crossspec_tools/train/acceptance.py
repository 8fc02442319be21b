"""How far drafts would be accepted on held-out responses, without an engine.

A greedy response is the target's own greedy path. The drafts made at every place of it are compared with the text
itself, and a walk over these places gives the rounds of a decoding run.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from crossspec_tools.train.generations import Batch, Generation, at, collate
from vllm_crossspec.files import write_json

# (batch, anchors int64 [B, A]) -> drafted tokens int64 [B, A, K]
DraftFn = Callable[[Batch, torch.Tensor], torch.Tensor]


@torch.no_grad()
def measure(rows: Sequence[Generation], draft: DraftFn, num_drafts: int, rows_per_batch: int = 16) -> dict[str, float]:
    """Simulate greedy decoding of the greedy ``rows`` with chains of ``num_drafts`` tokens.

    A round begins at a token that the target has just emitted (``draft``'s anchor). Its leading right drafts are
    accepted, and the target adds one token. Rounds whose drafts reach past the end of the response are not counted:
    what would have been accepted there is unknown. Returns ``dev_accept``, tokens a round over all rows;
    ``dev_accept_<category>``; ``accept_pos_<i>``, the share of the rounds that accept draft i (counted from 1).
    """
    rounds: dict[str, list[int]] = {}
    greedy = [r for r in rows if r.greedy and len(r.response_ids) > num_drafts]
    greedy.sort(key=lambda r: len(r.prompt_ids) + len(r.response_ids))
    for start in range(0, len(greedy), rows_per_batch):
        group = greedy[start : start + rows_per_batch]
        batch = collate(group)
        places = (batch.ends - batch.starts - num_drafts).clamp(min=0)
        offsets = torch.arange(int(places.max()))
        anchors = torch.minimum(batch.starts[:, None] + offsets, (batch.ends - 1)[:, None])
        drafts = draft(batch, anchors)
        truth = at(batch.tokens, anchors[..., None] + torch.arange(1, num_drafts + 1))
        accepted = (drafts == truth).long().cumprod(-1).sum(-1)
        for row, counts, last in zip(group, accepted.tolist(), places.tolist(), strict=True):
            place = 0
            while place < last:
                rounds.setdefault(row.category, []).append(counts[place])
                place += counts[place] + 1
    every = [count for counts in rounds.values() for count in counts]
    if not every:
        return {}
    figures = {"dev_accept": 1 + sum(every) / len(every)}
    for category, counts in sorted(rounds.items()):
        figures[f"dev_accept_{category}"] = 1 + sum(counts) / len(counts)
    for position in range(1, num_drafts + 1):
        figures[f"accept_pos_{position}"] = sum(c >= position for c in every) / len(every)
    return figures


def report(title: str, figures: dict[str, float], path: Path) -> dict[str, float]:
    """Print the acceptance by category and by position, and store it as JSON at ``path``."""
    write_json(path, {key: round(value, 4) for key, value in figures.items()}, indent=1)
    if not figures:
        print(f"{title}: no held-out responses (dev-*.jsonl.gz), so no acceptance was measured")
        return figures
    lengths = [
        f"{k.removeprefix('dev_accept').removeprefix('_') or 'all'} {v:.2f}" for k, v in figures.items() if "dev" in k
    ]
    if figures["dev_accept"] < 1.005:  # shown as 1.00
        lengths[0] += f" ({'almost ' * (figures['dev_accept'] > 1)}nothing is accepted yet)"
    shares = [f"{v:.2f}" for k, v in figures.items() if k.startswith("accept_pos_")]
    print(f"{title}: held-out tokens a round: {', '.join(lengths)}; accepted by position: {' '.join(shares)}")
    return figures
