"""Our dynamic tree against the tree that SafeAILab's EAGLE-3 builds from the same weights and states.

Builder against builder: one drafter, SafeAILab's own code, answers both, on the same text and with its cache moving
from round to round. How the two count their sizes is told in ``reference/tree.py``. Runs where a checkout of the
reference is at hand (docs/results/parity.md); needs no engine.
"""

import functools
import os
import random
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import engines
import pytest
import torch
from reference import models, safeailab, target, tree
from reference.tree import Agreement, Settings

from vllm_crossspec.trees.builders.dynamic import DynamicTree

OUR_DEFAULTS = Settings(total_tokens=61, depth=7, top_k=10)
THREE_LEVELS = Settings(41, 2, 6)
ALL_CANDIDATES = Settings(1 + 3 + 2 * 9, 2, 3)
SETTINGS = [
    ("wide", OUR_DEFAULTS),
    ("pocket", OUR_DEFAULTS),
    ("wide", THREE_LEVELS),
    ("pocket", THREE_LEVELS),
    # SafeAILab's evaluation and the defaults of its classes.
    ("pocket", Settings(60, 5, 10)),
    ("pocket", Settings(63, 5, 8)),
    ("pocket", Settings(60, 7, 10)),
    ("wide", Settings(60, 3, 10)),
    ("narrow", Settings(61, 7, 4)),
    # Nothing left out; a chain; the first level alone; as many nodes as may be.
    ("wide", ALL_CANDIDATES),
    ("pocket", Settings(8, 6, 1)),
    ("wide", Settings(6, 0, 5)),
    ("pocket", Settings(256, 6, 12)),
]


class Text(NamedTuple):
    """A prompt with the target's greedy continuation, the drafter's inputs for it, and where its rounds begin."""

    tokens: list[int]
    states: torch.Tensor
    rounds: list[int]


@functools.cache
def scratch():
    return tempfile.TemporaryDirectory(prefix="crossspec-trees-")


@functools.cache
def folders(name):
    if name == "pocket":
        return models.Models(engines.TARGET, engines.EAGLE3, engines.DFLASH, engines.DART)
    return getattr(models, name)(Path(scratch().name) / name)


@functools.cache
def hf_target(name):
    return target.load(folders(name).target)


@functools.cache
def drafter(name):
    where = os.environ.get(safeailab.VARIABLE)
    if not where:
        pytest.skip(f"the reference is not at hand: {safeailab.HOW_TO_GET}")
    return safeailab.load(Path(where), folders(name).eagle3, hf_target(name), 7)


def prompts(name):
    if name == "pocket":
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(engines.TARGET)
        return [tokenizer.encode(text) for text in engines.prompts(4)]
    draw = random.Random(0)
    return [[draw.randrange(4, models.VOCAB) for _ in range(length)] for length in (2, 5, 33, 64)]


@functools.cache
def texts(name):
    """Rounds of 1 to 5 tokens, as if up to four drafts had been accepted."""
    hf, draw, result = hf_target(name), random.Random(1), []
    layers = safeailab.tapped_layers(hf.config.num_hidden_layers)
    for prompt in prompts(name):
        tokens = list(prompt)
        for _ in range(24):
            tokens.append(target.greedy(hf, tokens)[0][-1])
        rounds = [len(prompt) + 1]
        while rounds[-1] + 5 <= len(tokens):
            rounds.append(rounds[-1] + draw.randint(1, 5))
        result.append(Text(tokens, target.states(hf, tokens, layers), rounds))
    return result


def agreement(name, settings, our_sizes=None, spoil=tree.passes_as_told, num_texts=None):
    """Both builders on every round; the last three arguments make ours another one, or take fewer of the four texts."""
    model = drafter(name)
    tree.configure(model, settings)
    sizes = our_sizes or settings.ours()
    builder = DynamicTree(**sizes, max_num_reqs=1, device=torch.device("cpu"))
    total = Agreement()
    for text in texts(name)[:num_texts]:
        model.reset_kv()
        # The last known token has no state yet: the target has not seen it.
        for before, known in pairwise([1, *text.rounds]):
            cache, states, tokens = model.stable_kv, text.states[:, before - 1 : known - 1], text.tokens[:known]
            reference = tree.theirs(model, states, tokens)
            mine = tree.ours(model, builder, states, tokens, cache, spoil)
            total += tree.compare(tree.nodes_of(mine), reference)
    print(f"EAGLE-3 tree {name} {settings}: {total}")
    return total


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the reference runs on the CPU")


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=lambda value: value if isinstance(value, str) else None)
def test_dynamic_tree_as_safeailab(name, settings):
    found = agreement(name, settings, num_texts=4 if settings == OUR_DEFAULTS else 2)
    assert found.equal + found.ties == found.rounds > (25 if settings == OUR_DEFAULTS else 12), found
    assert found.ties <= 0.05 * found.rounds, found
    assert found.nodes == found.rounds * (settings.total_tokens - 1), found
    assert found.largest_error < 1e-5, found


def test_the_trees_are_deep_and_wide_enough_to_tell():
    assert agreement("pocket", OUR_DEFAULTS, num_texts=1).depth == OUR_DEFAULTS.depth + 1


def blind(rows, positions):
    """No node of the tree sees another."""
    kept = torch.zeros_like(rows)
    kept[..., -rows.shape[2] :] = torch.eye(rows.shape[2])
    return kept, positions


def shifted(rows, positions):
    """The tree's rows stand one position too far."""
    return rows, positions + 1


DIFFERENT = {
    "depth counted as SafeAILab does": {"our_sizes": THREE_LEVELS.ours() | {"depth": 2}},
    "one level more": {"our_sizes": THREE_LEVELS.ours() | {"depth": 4}},
    "the root counted as a node": {"our_sizes": THREE_LEVELS.ours() | {"num_nodes": 41}},
    "another top_k": {"our_sizes": THREE_LEVELS.ours() | {"top_k": 5}},
}


@pytest.mark.parametrize("change", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_other_sizes_are_seen(change):
    found = agreement("pocket", THREE_LEVELS, num_texts=2, **change)
    assert found.rounds > 8 and found.equal + found.ties < 0.5 * found.rounds, found


@pytest.mark.parametrize("spoil", [blind, shifted])
def test_a_spoilt_pass_is_seen(spoil):
    """The random drafter's attention is sharp enough, and with no candidate left out no level can hide."""
    found = agreement("wide", ALL_CANDIDATES, num_texts=2, spoil=spoil)
    assert found.rounds > 8 and found.equal + found.ties < 0.5 * found.rounds, found


def test_a_comparison_knows_ties_from_differences():
    node = tree.Node
    reference = [node((1,), -0.5), node((2,), -1.0), node((1, 3), -1.00001), node((2, 4), -2.0)]
    assert tree.compare(reference, reference).equal == 1
    swapped = [reference[0], reference[2], reference[1], reference[3]]
    assert tree.compare(swapped, reference)[:3] == (1, 0, 1)
    assert tree.compare([*reference[:3], node((1, 7), -2.00001)], reference).ties == 1
    assert tree.compare([*reference[:3], node((1, 7), -2.1)], reference)[:3] == (1, 0, 0)
    assert tree.compare([reference[0], node((9,), -1.0), *reference[2:]], reference)[:3] == (1, 0, 0)
    assert tree.compare(reference[:3], reference)[:3] == (1, 0, 0)
    assert tree.compare([*reference[:3], node((2, 4), -2.01)], reference)[:3] == (1, 0, 0)
