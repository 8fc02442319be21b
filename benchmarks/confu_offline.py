"""What ConFu's futures are worth, in chains and in trees: tokens a round on held-out responses, without an engine.

    python benchmarks/confu_offline.py --responses work/responses            # the pocket's ConFu and its control
    python benchmarks/confu_offline.py --responses work/responses --nodes 0,24,60      # 0 is the chain
    python benchmarks/confu_offline.py --responses FOLDER --target MODEL --confu MODEL --control MODEL

A greedy response is the target's own path: whatever a draft has of it would be accepted. All responses of a group are
decoded side by side, round by round as an engine does it: the future of a round comes from a contemplate token that
the round before has gated, the first round has none, and trees are EAGLE-2's. The control is an EAGLE-3 drafter; the
third row is ConFu with `no_future_embed` in every round. Gains of ConFu are beside each of the two, with the 95%
interval that drawing other responses (bootstrap) would give. Prints a table, and one JSON document as its last line;
benchmarks/README.md describes it. Needs no GPU.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from dart_offline import POCKET, accepted, empty_tree, tokens_per_round
from intervals import Walk, gain
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from vllm_crossspec.cli import meta
from vllm_crossspec.drafters.eagle3.checkpoint import default_target_layers
from vllm_crossspec.training.blocks import rotate
from vllm_crossspec.training.confu import ConfuDrafter
from vllm_crossspec.training.confu_head_states import load_confu
from vllm_crossspec.training.eagle3 import Eagle3Config, Eagle3Drafter, read_start
from vllm_crossspec.training.generations import Generation, collate, read_generations
from vllm_crossspec.training.start import load_start
from vllm_crossspec.training.states import FrozenTarget, load_target
from vllm_crossspec.tree.torch_ops import DynamicTree

ROWS_AT_ONCE = 32
CHAIN = 7
"""Tokens of a chain."""

KeysAndValues = tuple[torch.Tensor, torch.Tensor]


class Size(NamedTuple):
    """Of a tree; a chain is one of a single node a level."""

    nodes: int
    depth: int
    top_k: int

    @property
    def most(self) -> int:
        """Nodes that a tree so deep and wide can have."""
        return self.top_k + (self.depth - 1) * self.top_k**2


class Models(NamedTuple):
    """A target, and what drafts for it."""

    target: FrozenTarget
    confu: ConfuDrafter
    control: Eagle3Drafter


class Decoded(NamedTuple):
    """B texts decoded.

    Attributes:
        walk: their tokens and rounds.
        reached: int64 [B, depth], rounds that accepted at least 1, 2, ... drafts.
    """

    walk: Walk
    reached: np.ndarray


def add_models(parser: argparse.ArgumentParser) -> None:
    """Options that name the models, and which of the responses count."""
    add = parser.add_argument
    add("--split", default="dev", help="its shards SPLIT-*.jsonl.gz; only greedy responses count")
    add("--target", type=Path, default=POCKET / "target", help="folder of the target")
    add("--confu", type=Path, default=POCKET / "confu", help="folder of the ConFu drafter")
    add("--control", type=Path, default=POCKET / "eagle3-longer", help="folder of the EAGLE-3 drafter beside it")
    add("--threads", type=int, default=1, help="of PyTorch")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser)
    add = parser.add_argument
    add("--responses", type=Path, required=True, help="folder that `crossspec train generate` wrote for this target")
    add("--rows", type=int, help="at most so many responses")
    add("--nodes", default="0,60", help=f"sizes of trees, with commas between them; 0 is a chain of {CHAIN} tokens")
    add("--depth", type=int, default=8, help="levels of a tree")
    add("--top-k", type=int, default=10, help="nodes of a level that are expanded, and candidates of each")
    add("--json", type=Path, help="also write the document to this file")
    options = parser.parse_args(argv)
    try:
        options.nodes = [int(nodes) for nodes in options.nodes.split(",")]
    except ValueError:
        parser.error(f"--nodes {options.nodes}: give numbers with commas between them")
    most = Size(0, options.depth, options.top_k).most
    if options.depth < 1 or options.top_k < 1 or not all(0 <= nodes <= most for nodes in options.nodes):
        parser.error(f"--nodes {options.nodes}: 0 to {most} with --depth {options.depth} and --top-k {options.top_k}")
    return options


# -- the drafters ---------------------------------------------------------------------------------------------


def load_control(folder: Path, target: FrozenTarget) -> Eagle3Drafter:
    """An EAGLE-3 drafter as `crossspec train eagle3` writes it, in float32."""
    start, kept = read_start(folder, target.config, key="--control")
    sizes = Eagle3Config(intermediate_size=start.intermediate_size, draft_vocab_size=len(kept))
    model = Eagle3Drafter(sizes, target.config, kept, seed=0)
    load_start(model, start)
    return model.eval()


def load_models(options: argparse.Namespace) -> Models:
    """What the options name. Raises ValueError, one sentence that names the option, before weights are read."""
    responses = options.responses
    if not list(responses.glob(f"{options.split}-*.jsonl.gz")):
        raise ValueError(f"--responses {responses}: no {options.split}-*.jsonl.gz; see `crossspec train generate`")
    causal_lm, _ = load_target(options.target, torch.float32)
    confu = load_confu(options.confu, options.target, causal_lm.config, "--confu")
    target = FrozenTarget(causal_lm, default_target_layers(causal_lm.config.num_hidden_layers), bfloat16=False)
    return Models(target, confu, load_control(options.control, target))


def read_rows(options: argparse.Namespace, vocab_size: int, deepest: int) -> list[Generation]:
    """Greedy responses that are longer than ``deepest`` tokens, the shortest first."""
    rows = read_generations(options.responses, options.split, vocab_size)
    rows = [row for row in rows if row.greedy and len(row.response_ids) > deepest][: options.rows]
    if not rows:
        raise ValueError(f"--responses {options.responses}: no greedy response is longer than {deepest} tokens")
    return sorted(rows, key=lambda row: len(row.prompt_ids) + len(row.response_ids))


# -- decoding -------------------------------------------------------------------------------------------------


class Group:
    """Responses that are decoded side by side by one drafter.

    Shape legend: R responses of a round, n nodes, H hidden size.

    Args:
        model: either drafter.
        target: gives it the states.
        rows: greedy responses, each longer than a draft is deep.
        futures: whether rounds behind the first have one; of no meaning to EAGLE-3.
    """

    def __init__(self, model: Eagle3Drafter, target: FrozenTarget, rows: list[Generation], futures: bool):
        self.model, self.target = model, target
        self.contemplates = isinstance(model, ConfuDrafter)
        self.batch = collate(rows)
        tokens, cache = self.batch.tokens, None
        if self.contemplates and futures:
            self.states, cache = target.states_and_cache(tokens)
        else:
            self.states = target.states(tokens)
        self.cache = cache
        self.features = model.fc(self.states.taps)
        entries = model.join(F.embedding(tokens[:, 1:], target.embedding), self.features[:, :-1])
        attention, places = model.midlayer.self_attn, torch.arange(tokens.shape[1] - 1)
        self.keys, self.values = attention.keys_values(entries, places, model.theta)

    def decode(self, size: Size) -> Decoded:
        """Decode all responses with trees of ``size``; rounds that would reach past a response's end are not made."""
        place, before = self.batch.starts - 1, torch.full_like(self.batch.starts, -1)
        tokens, rounds = torch.zeros_like(place), torch.zeros_like(place)
        reached = torch.zeros(len(place), size.depth, dtype=torch.int64)
        while len(active := (place + 1 + size.depth < self.batch.ends).nonzero()[:, 0]):
            accepted = Round(self, active, place[active], before[active]).accepted(size)
            before[active] = place[active]
            place[active] += accepted + 1
            tokens[active] += accepted + 1
            rounds[active] += 1
            reached[active] += torch.arange(size.depth) < accepted[:, None]
        return Decoded(Walk(tokens.numpy(), rounds.numpy()), reached.numpy())


class Round:
    """One round of R responses: drafts behind the entries at ``place``, int64 [R].

    Args:
        group: of all responses.
        active: int64 [R], which of them.
        place: each one's newest entry, whose token the target has just emitted.
        before: where the round before began, -1 at the first.
    """

    def __init__(self, group: Group, active: torch.Tensor, place: torch.Tensor, before: torch.Tensor):
        self.group, self.active, self.place = group, active, place
        model = group.model
        self.root = group.batch.tokens[active, place + 1]
        self.root_state = group.features[active, place]
        prefix = torch.arange(group.keys.shape[1]) <= place[:, None]
        self.keys, self.values, self.seen = [group.keys[active]], [group.values[active]], [prefix]
        self.future: KeysAndValues | None = None
        self.skip = torch.zeros_like(self.root_state)
        if isinstance(model, ConfuDrafter):
            future = self._future(model, before)
            entry = model.join(model.future_embed(self.root_state), future)
            self.future = model.midlayer.self_attn.bare_keys_values(entry)
            self.skip = model.future_skip(future)

    def _future(self, model: ConfuDrafter, before: torch.Tensor) -> torch.Tensor:
        """[R, H], gated by the states at ``before``."""
        group, active = self.group, self.active
        nothing = model.no_future_embed.expand(len(active), -1)
        if group.cache is None or (before < 0).all():
            return nothing
        cache = [(keys[active], values[active]) for keys, values in group.cache]
        gates = group.states.taps[active, before.clamp(min=0)][:, None]
        futures = model.futures(group.target, cache, gates, self.place[:, None])[:, 0]
        return torch.where(before[:, None] < 0, nothing, futures)

    def accepted(self, size: Size) -> torch.Tensor:
        """Grow the trees; how many tokens of the responses they have as a path, int64 [R]."""
        num_reqs, top_k = len(self.active), size.top_k
        tree = DynamicTree(
            num_nodes=size.nodes, depth=size.depth, top_k=top_k, max_num_reqs=num_reqs, device=torch.device("cpu")
        )
        nobody = torch.zeros(num_reqs, 1, 0, dtype=torch.bool)
        log_probs, tokens, states = self._level(0, self.root[:, None], self.root_state[:, None], nobody, top_k)
        beam = tree.start(log_probs[:, 0], tokens[:, 0])
        states = states.expand(-1, top_k, -1)
        for level in range(1, size.depth):
            bits = torch.arange(level * top_k)
            masks = (beam.masks[..., bits // 32] >> (bits % 32)) & 1 > 0
            states = states.gather(1, beam.parents.long()[..., None].expand(-1, -1, states.shape[-1]))
            log_probs, tokens, states = self._level(level, beam.tokens, states, masks, top_k)
            beam = tree.expand(level + 1, log_probs, tokens)
        found = empty_tree(num_reqs, size.nodes)
        tree.finish(found)
        columns = self.place[:, None] + 2 + torch.arange(size.depth)
        return accepted(found, self.group.batch.tokens[self.active[:, None], columns])

    def _level(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor, masks: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The drafter over n nodes of each response.

        Args:
            level: 0 is the root.
            tokens: int64 [R, n].
            states: [R, n, H] of their parents.
            masks: bool [R, n, nodes so far, with these].
            count: candidates of a node.

        Returns:
            Log-probabilities and tokens [R, n, count] of the candidates, falling; the nodes' states [R, n, H].
        """
        model, layer = self.group.model, self.group.model.midlayer
        attention = layer.self_attn
        states = states + self.skip[:, None]
        entries = model.join(F.embedding(tokens, self.group.target.embedding), states)
        positions = (self.place + level)[:, None].expand_as(tokens)
        query = attention.queries(entries, positions, model.theta)
        if level:  # the root's are in the text's
            own = attention.keys_values(entries, positions, model.theta)
            self.keys.append(own[0])
            self.values.append(own[1])
        keys, values = list(self.keys), list(self.values)
        seen = [self.seen[0][:, None].expand(-1, tokens.shape[1], -1), masks]
        if self.future is not None:
            keys.append(rotate(self.future[0], self.place + level + 1, model.theta)[:, None])
            values.append(self.future[1][:, None])
            seen.append(torch.ones(*tokens.shape, 1, dtype=torch.bool))
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            torch.cat(keys, 1).transpose(1, 2),
            torch.cat(values, 1).transpose(1, 2),
            attn_mask=torch.cat(seen, 2)[:, None],
            enable_gqa=True,
        )
        states = states + attention.o_proj(out.transpose(1, 2).flatten(2))
        states = states + layer.mlp(layer.post_attention_layernorm(states))
        best = model.lm_head(model.norm(states)).log_softmax(-1).topk(count, dim=-1)
        return best.values, model.kept[best.indices], states


@torch.no_grad()
def decode(
    model: Eagle3Drafter,
    target: FrozenTarget,
    rows: list[Generation],
    size: Size,
    *,
    futures: bool = True,
    advance: Callable[[int], None] = lambda count: None,
) -> Decoded:
    """Decode ``rows``, which are of falling or rising length, in groups; ``advance`` hears of each."""
    found = []
    for begin in range(0, len(rows), ROWS_AT_ONCE):
        group = rows[begin : begin + ROWS_AT_ONCE]
        found.append(Group(model, target, group, futures).decode(size))
        advance(len(group))
    walk = Walk(*(np.concatenate(part) for part in zip(*(group.walk for group in found), strict=True)))
    return Decoded(walk, np.concatenate([group.reached for group in found]))


# -- figures --------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, progress: Progress) -> list[dict[str, Any]]:
    """One row of figures for every size and drafter."""
    target, confu, control = load_models(options)
    rows = read_rows(options, target.config.vocab_size, max(options.depth, CHAIN))
    categories = [row.category for row in rows]
    bar = progress.add_task("responses", total=3 * len(options.nodes) * len(rows))
    found = []
    for nodes in options.nodes:
        size = Size(nodes, options.depth, options.top_k) if nodes else Size(CHAIN, CHAIN, 1)
        runs = (("confu", confu, True), ("control", control, True), ("confu, no futures", confu, False))
        walks = {
            name: decode(model, target, rows, size, futures=futures, advance=lambda n: progress.advance(bar, n)).walk
            for name, model, futures in runs
        }
        for name, walk in walks.items():
            figures = tokens_per_round(walk, categories)
            figures["mean"] = float(np.mean([figures[category] for category in set(categories)]))
            gained = None if name == "confu" else [round(x, 2) for x in gain(walks["confu"], walk)]
            found.append(
                {
                    "nodes": nodes,
                    "drafter": name,
                    "tokens_per_round": {k: round(v, 4) for k, v in figures.items()},
                    "rounds": int(walk.rounds.sum()),
                    "responses": len(rows),
                    "confu_gain_percent": gained,
                }
            )
    return found


def table(rows: list[dict[str, Any]]) -> Table:
    """The rows, to read."""
    grid = Table(title="tokens a round")
    columns = list(rows[0]["tokens_per_round"])
    for name in ("drafts", "drafter"):
        grid.add_column(name, no_wrap=True)
    for name in (*columns, "confu's gain", "95%"):
        grid.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        seen = row["confu_gain_percent"]
        grid.add_row(
            f"{row['nodes']} nodes" if row["nodes"] else f"chain of {CHAIN}",
            row["drafter"],
            *(f"{row['tokens_per_round'][name]:.2f}" for name in columns),
            *((f"{seen[0]:+.1f}%", f"{seen[1]:+.1f} {seen[2]:+.1f}") if seen else ("", "")),
        )
    return grid


def main(argv: list[str] | None = None) -> int:
    """Measure and print; 2 for what cannot be measured."""
    options = arguments(argv)
    torch.set_num_threads(options.threads)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console) as progress:
            rows = measure(options, progress)
    except ValueError as problem:
        console.print(str(problem), highlight=False)
        return 2
    Console(width=max(120, Console().width)).print(table(rows))
    document = {
        "meta": {
            "benchmark": "confu_offline",
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": " ".join(sys.argv),
            "commit": meta.commit(),
            "hardware": meta.hardware(),
            "depth": options.depth,
            "top_k": options.top_k,
        },
        "rows": rows,
    }
    text = json.dumps(document)
    if options.json is not None:
        options.json.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
