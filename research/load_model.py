"""A model of a round on an H100 at every load: what widths, the schedule and a joint budget are worth there.

    record="python research/heterospec_offline.py --responses work/responses --rows 48"
    $record --out work/trees
    $record --out work/trees-5 --depth 5 --top-k 5 --nodes 20
    $record --out work/trees-3 --depth 3 --top-k 3 --nodes 8
    python research/load_model.py --records work/trees work/trees-5 work/trees-3

Tokens come from records: which nodes of which trees were accepted, at every place of held-out texts. Seconds come from
:class:`Machine`, a fit to what one H100 took at Qwen3-8B's shape. The schedule is the product's own
(`load/schedule.py`): it measures this machine at start-up, with noise, and learns while it serves. A round is one of
decoding alone, and the host takes no time. So the figures compare with each other better than with a real machine's.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import heterospec_offline
import numpy as np
from sklearn.isotonic import IsotonicRegression

from vllm_crossspec.drafting.level_trees import NARROW, NARROW_SHARED
from vllm_crossspec.load.costs import Cost, round_seconds
from vllm_crossspec.load.schedule import LiveSchedule, candidate_widths, choose_schedule

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CHAIN = 7
LEARNS, SERVES = 1500, 1500
"""Rounds of the schedule: these teach, those count."""
DRAWN_BATCHES = 300
NOISE = 0.03
"""Deviation of a round's seconds, of its logarithm."""


class Machine(NamedTuple):
    """Milliseconds of an H100 with Qwen3-8B's shape in bfloat16 and an EAGLE-3 drafter with 32,000 draft tokens.

    A pass waits for memory or computes, and at the knee does both. The target's weights take 7 ms (measured: 7.07), a
    row 26.5 us (measured: 13.2 to 13.9 ms for 488 rows, 9.8 for 256). A drafter's pass takes 0.38 ms by its bytes; what
    was measured on the H100 had a head five times too large. The head's operations were about 0.07 ms a level; by
    kernels of our own they are guessed at 0.02.
    """

    context: int = 512
    head: float = 0.07

    def step(self, rows: float, num_reqs: int) -> float:
        """The target's pass over so many rows, sampling included."""
        return _knee(7.0, 0.0265 * rows) + 0.028 * num_reqs * self.context / 512

    def draft(self, depth: int, top_k: int, num_reqs: int) -> float:
        """Levels of ``top_k`` nodes of each request; the first also takes in what was accepted."""
        passes = [_knee(0.38, 0.0013 * num_reqs * rows) for rows in (2, *[top_k] * (depth - 1))]
        return sum(passes) + depth * self.head


def _knee(waits: float, computes: float) -> float:
    return float((waits**2.7 + computes**2.7) ** (1 / 2.7))


class Trees(NamedTuple):
    """What trees of one shape get at P places of texts.

    Attributes:
        depth, top_k: with which they are grown.
        hits: bool [P, N] whether the node of each rank is on the text's path.
        log_probs: float [P, N] by which nodes are ranked, falling.
        firsts: int [B + 1] first place of each text, and their end.
    """

    depth: int
    top_k: int
    hits: np.ndarray
    log_probs: np.ndarray
    firsts: np.ndarray

    def accepted(self, width: int) -> np.ndarray:
        """int [P] tokens accepted of the best ``width`` nodes."""
        return np.asarray(self.hits[:, :width].sum(1))


def read_trees(folder: Path) -> Trees:
    """From the records of one tree shape. Raises ValueError."""
    records = heterospec_offline.read(folder)
    tree = records.facts.tree
    ranks = records.ranks[:, : tree.depth, tree.depth - 1].astype(np.int64)
    hits = np.zeros((len(ranks), tree.num_nodes + 1), dtype=bool)
    kept = np.where((ranks > 0) & (ranks <= tree.num_nodes), ranks, 0)
    kept *= np.cumprod(kept > 0, axis=1)  # a path ends with its first node that was not kept
    np.put_along_axis(hits, kept, True, axis=1)
    firsts = np.append(records.firsts, len(ranks))
    return Trees(tree.depth, tree.top_k, hits[:, 1:], records.log_probs, firsts)


def places_of_rounds(accepted: np.ndarray, firsts: np.ndarray) -> np.ndarray:
    """Places at which rounds begin if texts are decoded with these accepted tokens."""
    found = []
    for begin, end in itertools.pairwise(firsts):
        place = int(begin)
        while place < end:
            found.append(place)
            place += 1 + int(accepted[place])
    return np.array(found)


class Model:
    """Tokens and milliseconds of rounds.

    Args:
        trees: shapes, of which narrower ones are grown where fewer nodes are verified.
        chain: int [P] first choices in a row that are the text's, at the places of the trees.
        machine: what they cost.
        scale: accepted drafts count so many times.
    """

    def __init__(self, trees: Sequence[Trees], chain: np.ndarray, machine: Machine, scale: float):
        self.trees = sorted(trees, key=lambda tree: tree.hits.shape[1])
        self.chain_accepted, self.machine, self.scale = chain, machine, scale
        self.num_nodes, self.depth = self.trees[-1].hits.shape[1], self.trees[-1].depth

    def grown(self, width: int, narrow: dict[int, tuple[int, int]]) -> Trees:
        """The trees that are grown where ``width`` nodes of a request are verified."""
        shape = next((shape for nodes, shape in narrow.items() if width <= nodes), None)
        return next((tree for tree in self.trees if (tree.depth, tree.top_k) == shape), self.trees[-1])

    def rounds(self, width: int) -> np.ndarray:
        """Tokens of a request in each round of decoding with so many nodes."""
        if not width:
            return np.ones(1)
        tree = self.grown(width, NARROW)
        accepted = tree.accepted(width)
        return 1 + self.scale * accepted[places_of_rounds(accepted, tree.firsts)]

    def cost(self, width: int, num_reqs: int) -> Cost:
        """Milliseconds of a round with so many nodes of each request."""
        tree = self.grown(width, NARROW)
        draft = self.machine.draft(tree.depth, tree.top_k, num_reqs) if width else 0.0
        return Cost(self.machine.step(num_reqs * (1 + width), num_reqs), draft)

    def plain(self, num_reqs: int) -> float:
        """Tokens a millisecond of plain decoding."""
        return num_reqs / self.machine.step(num_reqs, num_reqs)

    def times_plain(self, width: int, num_reqs: int) -> float:
        """Of a width that never changes."""
        return float(num_reqs * self.rounds(width).mean() / sum(self.cost(width, num_reqs)) / self.plain(num_reqs))

    def chain(self, length: int, num_reqs: int) -> float:
        """Times plain of the drafter's first choices alone: nodes of a tree one node wide."""
        tree = self.trees[-1]
        accepted = np.minimum(self.chain_accepted, length)
        tokens = 1 + self.scale * accepted[places_of_rounds(accepted, tree.firsts)].mean()
        cost = self.machine.step(num_reqs * (1 + length), num_reqs) + self.machine.draft(length, 1, num_reqs)
        return float(num_reqs * tokens / cost / self.plain(num_reqs))

    def joint(self, num_reqs: int, rng: np.random.Generator) -> tuple[float, float]:
        """Times plain where a batch's best nodes are verified, as many as pay, and draft nodes of a request on average.

        Nodes are known by chances that were calibrated on the same texts, which a schedule by width is not. The best of
        the three sizes of trees that a joint budget grows.
        """
        best = (0.0, 0.0)
        for width in sorted({*NARROW_SHARED, self.num_nodes}):
            tree = self.grown(width, NARROW_SHARED)
            width = min(width, tree.hits.shape[1])
            chances = _calibrated(tree)[:, :width]
            places = places_of_rounds(tree.accepted(width), tree.firsts)
            draft = self.machine.draft(tree.depth, tree.top_k, num_reqs)
            rows = num_reqs + np.arange(num_reqs * width + 1)
            seconds = np.array([self.machine.step(float(n), num_reqs) for n in rows]) + draft
            tokens = spent = nodes = 0.0
            for _ in range(DRAWN_BATCHES):
                batch = rng.choice(places, num_reqs)
                order = np.argsort(-chances[batch], axis=None, kind="stable")
                worth = num_reqs + self.scale * np.append(0.0, chances[batch].ravel()[order].cumsum())
                count = int((worth / seconds).argmax())
                tokens += num_reqs + self.scale * tree.hits[batch][:, :width].ravel()[order[:count]].sum()
                spent += seconds[count]
                nodes += count / num_reqs
            best = max(best, (tokens / spent / self.plain(num_reqs), nodes / DRAWN_BATCHES))
        return best

    def schedule(self, num_reqs: int, rng: np.random.Generator) -> tuple[float, dict[int, int]]:
        """Times plain of the product's own schedule, tries of other widths included, and its rounds by width."""
        widths = candidate_widths(self.num_nodes, self.depth)

        def noisy(milliseconds: float) -> float:
            return float(milliseconds * rng.lognormal(0.0, NOISE))

        table = {w: {n: Cost(*map(noisy, self.cost(w, n))) for n in BATCHES if n * (w + 1) <= 1024} for w in widths}
        seconds = round_seconds(table)
        live = LiveSchedule(seconds, choose_schedule(seconds, BATCHES[-1]))
        rounds = {width: self.rounds(width) for width in widths}
        tokens = spent = 0.0
        last, chosen = -1, dict.fromkeys(widths, 0)
        for number in range(LEARNS + SERVES):
            width = live[num_reqs]
            took = noisy(sum(self.cost(width, num_reqs)))
            got = rng.choice(rounds[width], num_reqs)
            if width == last:
                live.saw_round(width, num_reqs, took)
            for one in got if width else ():
                live.saw_tokens(width, float(one), num_reqs)  # type: ignore[arg-type]
            last = width
            if number >= LEARNS:
                tokens, spent = tokens + got.sum(), spent + took
                chosen[width] += 1
        return tokens / spent / self.plain(num_reqs), {w: n for w, n in chosen.items() if n}


def _calibrated(tree: Trees) -> np.ndarray:
    """float [P, N] the share of nodes of such a log-probability that are accepted."""
    fit = IsotonicRegression(out_of_bounds="clip").fit(tree.log_probs.ravel(), tree.hits.ravel().astype(float))
    return np.asarray(fit.predict(tree.log_probs.ravel()).reshape(tree.log_probs.shape))


def table(model: Model, batches: Sequence[int], seed: int) -> list[dict[str, Any]]:
    """What is printed, a row a batch size."""
    rng = np.random.default_rng(seed)
    widths = candidate_widths(model.num_nodes, model.depth)
    found = []
    for n in batches:
        fixed = {width: model.times_plain(width, n) for width in widths if width}
        every = {width: model.times_plain(width, n) for width in range(1, model.num_nodes + 1)}
        best = max(every, key=every.__getitem__)
        speed, chosen = model.schedule(n, rng)
        joint, nodes = model.joint(n, rng)
        found.append(
            {
                "batch": n,
                "plain_ms": model.machine.step(n, n),
                "chain": max(model.chain(k, n) for k in range(1, CHAIN + 1)),
                "widths": fixed,
                "best_width": best,
                "best": every[best],
                "auto": speed,
                "rounds": chosen,
                "joint": joint,
                "joint_nodes": nodes,
            }
        )
    return found


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--records", type=Path, nargs="+", required=True, help="folders of heterospec_offline.py, a tree shape each")
    add("--scale", type=float, default=0.6, help="accepted drafts count so many times; a public drafter gets fewer")
    add("--context", type=int, default=Machine().context, help="tokens before a round")
    add("--head", type=float, default=Machine().head, help="milliseconds of the head's operations, a level")
    add("--batches", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    add("--seed", type=int, default=0)
    add("--json", type=Path, help="write the rows here, too")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 2 for records that cannot be read."""
    options = arguments(argv)
    try:
        trees = [read_trees(folder) for folder in options.records]
        chain = heterospec_offline.read(options.records[0]).chain.astype(np.int64)
    except ValueError as problem:
        print(problem, file=sys.stderr)
        return 2
    model = Model(trees, chain, Machine(options.context, options.head), options.scale)
    rows = table(model, options.batches, options.seed)
    widths = list(rows[0]["widths"])
    head = ["batch", "plain ms", "best chain", *(f"width {w}" for w in widths), "best width", "auto", "joint"]
    print(f"| {' | '.join(head)} |\n|" + " --- |" * len(head))
    for row in rows:
        fixed = [f"{row['widths'][w]:.2f}" for w in widths]
        best, joint = f"{row['best']:.2f} ({row['best_width']})", f"{row['joint']:.2f} ({row['joint_nodes']:.1f})"
        cells = [f"{row['batch']}", f"{row['plain_ms']:.1f}", f"{row['chain']:.2f}", *fixed, best, f"{row['auto']:.2f}"]
        print(f"| {' | '.join([*cells, joint])} |")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
