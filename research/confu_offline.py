"""ConFu's and EAGLE-3's rounds on greedy responses, in chains and in trees, without an engine.

A greedy response is the target's own path: whatever a draft has of it would be accepted. All responses of a group are
decoded side by side, round by round as an engine does it: the future of a round comes from a contemplate token that
the round before has gated, the first round has none, and trees are EAGLE-2's.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from intervals import Walk
from texts import POCKET, accepted, add_target, empty_tree, open_target, read_texts, shortest_first

from crossspec_tools.train.blocks import rotate
from crossspec_tools.train.confu import ConfuDrafter, load_confu
from crossspec_tools.train.eagle3 import Eagle3Drafter, read_start
from crossspec_tools.train.generations import Generation, collate
from crossspec_tools.train.recipes import Eagle3Config
from crossspec_tools.train.start import load_start
from crossspec_tools.train.states import FrozenTarget, target_settings
from vllm_crossspec.trees.builders.dynamic import DynamicTree

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
    """B texts decoded; ``reached`` int64 [B, depth] are the rounds that accepted at least 1, 2, ... drafts."""

    walk: Walk
    reached: np.ndarray


def add_models(parser: argparse.ArgumentParser) -> None:
    """Options that name the responses and the models."""
    add_target(parser)
    add = parser.add_argument
    add("--confu", type=Path, default=POCKET / "confu", help="folder of the ConFu drafter")
    add("--control", type=Path, default=POCKET / "eagle3-longer", help="folder of the EAGLE-3 drafter beside it")


# -- the drafters ---------------------------------------------------------------------------------------------


def load_control(folder: Path, target: FrozenTarget) -> Eagle3Drafter:
    """An EAGLE-3 drafter as `crossspec train eagle3` writes it, in float32."""
    start, kept = read_start(folder, target.config, key="--control")
    sizes = Eagle3Config(intermediate_size=start.size("intermediate_size"), draft_vocab_size=len(kept))
    model = Eagle3Drafter(sizes, target.config, kept, seed=0)
    load_start(model, start)
    return model.eval()


def load_models(options: argparse.Namespace) -> Models:
    """What the options name. Raises ValueError, one sentence that names the option."""
    target = open_target(options.target)
    confu = load_confu(options.confu, options.target, target.config, "--confu")
    return Models(target, confu, load_control(options.control, target))


def read_rows(options: argparse.Namespace, deepest: int) -> list[Generation]:
    """Greedy responses that are longer than ``deepest`` tokens, the shortest first."""
    return shortest_first(read_texts(options, target_settings(options.target).vocab_size, deepest))


# -- decoding -------------------------------------------------------------------------------------------------


class Group:
    """Greedy responses, each longer than a draft is deep, decoded side by side by one drafter.

    Shape legend: R responses of a round, n nodes, H hidden size. With ``futures`` ConFu's rounds behind the first have
    one.
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
    """One round of R responses, ``active`` ones of a group, int64 [R] each.

    ``place`` is each one's newest entry, whose token the target has just emitted; ``before``, where the round before
    began, -1 at the first.
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
        """The drafter over n nodes of each response; level 0 is the root.

        Args:
            tokens, states: int64 [R, n], and [R, n, H] of their parents.
            masks: bool [R, n, nodes so far, with these].

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
