"""Our continuity tree against DART's own C++ search: the same logits, the same n-grams, the same tree, ties aside.

What "ties aside" means is written down, and decided, in ``reference/dart_tree.py``. Runs where a checkout of the
reference is at hand: CROSSSPEC_DART_REFERENCE names its folder, CROSSSPEC_DART_BUILD (optional) one for build files.
"""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from ngram_counts import random_tokens
from reference.dart_tree import (
    ROUNDING,
    Exact,
    Question,
    Sizes,
    is_outcome,
    level_weight,
    load_searcher,
    logit_weight,
    their_tree,
)
from test_tree_builders import DEVICE, check_trees, paths, poisoned

from crossspec_tools.ngram.trie import import_trie
from vllm_crossspec.kinds.scoring import Scoring
from vllm_crossspec.ngram_store.store import open_store, place
from vllm_crossspec.trees.builders.continuity import ContinuityTree

pytestmark = pytest.mark.skipif("CROSSSPEC_DART_REFERENCE" not in os.environ, reason="needs a checkout of fvliang/DART")
VOCAB_SIZE, STOP, NUM_TOKENS = 60, 7, 4000
PAPER = Sizes(8, 25, 20, 59)
CASES = 40
SETTINGS = [
    # sizes, weight of the n-grams, stop token
    (PAPER, 0.5, STOP),
    (PAPER, 0.0, STOP),
    (PAPER, 2.0, -1),
    (Sizes(8, 25, 20, 60), 0.5, -1),
    # Fewer candidates than the beam is wide: every node is expanded, and no stop token, which theirs would expand too.
    (Sizes(4, 6, 20, 40), 0.5, -1),
    (Sizes(3, 25, 3, 100), 0.5, STOP),
    (Sizes(1, 25, 20, 60), 0.5, STOP),
    (Sizes(6, 2, 20, 200), 0.5, -1),
]
counted = {"cases": 0, "equal": 0, "tied": 0}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = os.environ.get("CROSSSPEC_DART_BUILD", tmp_path_factory.mktemp("build"))
    return load_searcher(Path(os.environ["CROSSSPEC_DART_REFERENCE"]), Path(folder) / "search")


@pytest.fixture(scope="module")
def ngrams(reference, tmp_path_factory):
    """By order: their trie, and ours imported from the file that theirs saves."""
    folder, found = tmp_path_factory.mktemp("ngrams"), {}
    for order in (2, 3, 4):
        trie = reference.TrieNgram(order)
        conversation = []
        for token in [*random_tokens(order, NUM_TOKENS, VOCAB_SIZE).tolist(), -1]:
            if token >= 0:
                conversation.append(token)
                continue
            trie.add_conversation(conversation)
            conversation = []
        trie.save(str(folder / f"{order}.trie"))
        import_trie(folder / f"{order}.trie", folder / str(order), vocab_size=VOCAB_SIZE)
        found[order] = trie, open_store(folder / str(order))
    return found


def questions(seed, sizes, count):
    """Logits over the vocabulary of ``count`` requests, and prompts of 1 to 6 tokens."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    # A likely token and a tail, sharper at the first levels, as a drafter's.
    sharpness = torch.linspace(3.0, 1.0, sizes.levels)[:, None]
    logits = torch.randn(count, sizes.levels, VOCAB_SIZE, generator=generator) * sharpness
    prompts = [rng.integers(0, 20, rng.integers(1, 7)).tolist() for _ in range(count)]
    return logits, prompts


def ours(sizes, logits, prompts, store, ngram_weight, stop):
    """Paths of our trees, as the engine asks for them: the drafter's log-probabilities, the best of each position."""
    log_probs, tokens = logits.log_softmax(dim=-1).topk(sizes.candidates, dim=-1)
    contexts = torch.full((len(prompts), 5), -1, dtype=torch.int32)
    for row, prompt in enumerate(prompts):
        contexts[row, 5 - len(prompt[-5:]) :] = torch.tensor(prompt[-5:])
    builder = ContinuityTree(
        num_nodes=sizes.num_nodes,
        depth=sizes.levels,
        top_k=sizes.candidates,
        beam_width=sizes.beam_width,
        max_num_reqs=len(prompts),
        device=DEVICE,
        scoring=Scoring(ngram_weight=ngram_weight),
        store=place(store, "host", DEVICE),
        stop_tokens=(stop,) if stop >= 0 else (),
    )
    out = poisoned(len(prompts), sizes.num_nodes)
    builder.build(log_probs=log_probs.to(DEVICE), tokens=tokens.to(DEVICE), contexts=contexts.to(DEVICE), out=out)
    check_trees(out, len(prompts))
    return [set(paths(out, row)) for row in range(len(prompts))]


def compare(reference, ngrams, order, settings, seed, count):
    """All requests of a batch; the numbers of equal trees, and of those that took the tie rule."""
    sizes, ngram_weight, stop = settings
    trie, store = ngrams[order]
    logits, prompts = questions(seed, sizes, count)
    trees = ours(sizes, logits, prompts, store, ngram_weight, stop)
    # What a lookup's answer is off by, through every level that has one.
    quantised = sum(level_weight(level) for level in range(1, sizes.levels)) * ngram_weight * store.header.max_error
    values, tokens = torch.topk(logits, sizes.candidates, dim=-1)
    equal = tied = 0
    for row, tree in enumerate(trees):
        shares = torch.softmax(values[row], dim=1).tolist()
        question = Question(tokens[row].tolist(), shares, prompts[row])
        theirs = their_tree(reference, trie, question, sizes, ngram_weight, stop)
        exact = Exact(trie, question, sizes, ngram_weight, stop, quantised + ROUNDING)
        found, was_open = is_outcome(exact, [tree, theirs])
        assert found == [True, True], (row, order, settings, tree ^ theirs)
        assert was_open or tree == theirs
        equal += tree == theirs
        tied += tree != theirs
    for name, number in (("cases", count), ("equal", equal), ("tied", tied)):
        counted[name] += number
    return equal, tied


@pytest.mark.parametrize("order", [2, 3, 4])
@pytest.mark.parametrize("settings", SETTINGS)
def test_our_tree_is_theirs(reference, ngrams, order, settings):
    equal, tied = compare(reference, ngrams, order, settings, SETTINGS.index(settings), CASES)
    assert equal + tied == CASES and equal >= 0.8 * CASES


def test_most_trees_are_equal_to_the_last_node():
    if not counted["cases"]:
        pytest.skip("no tree was compared in this run")
    print(f"\n{counted}")
    assert counted["tied"] <= 0.05 * counted["cases"]


def test_the_tie_rule_refuses_wrong_trees(reference, ngrams):
    """Trees of another context, other n-grams, other weights or one node less are no outcome of the search."""
    trie, store = ngrams[3]
    logits, prompts = questions(1, PAPER, 8)
    values, tokens = torch.topk(logits, PAPER.candidates, dim=-1)

    def trees(prompts=prompts, store=store, weight=0.5, stop=STOP, sizes=PAPER):
        return ours(sizes, logits, prompts, store, weight, stop)

    right = trees()
    wrong = {
        "another context": trees(prompts=[[*prompt[:-1], (prompt[-1] + 1) % 3] for prompt in prompts]),
        "other n-grams": trees(store=ngrams[2][1]),
        "another weight": trees(weight=0.6),
        "no n-grams": trees(weight=0.0),
        "a narrower beam": trees(sizes=PAPER._replace(beam_width=3)),
        "one node less": trees(sizes=PAPER._replace(num_nodes=58)),
        "another path": [{*list(tree)[1:], (99,)} for tree in right],
    }
    refused = dict.fromkeys(wrong, 0)
    for row, prompt in enumerate(prompts):
        question = Question(tokens[row].tolist(), torch.softmax(values[row], dim=1).tolist(), prompt)
        exact = Exact(trie, question, PAPER, 0.5, STOP, 2 * store.header.max_error + ROUNDING)
        found, _ = is_outcome(exact, [right[row], *(kind[row] for kind in wrong.values())])
        assert found[0]
        for name, was_found in zip(wrong, found[1:], strict=True):
            refused[name] += not was_found
    print(f"\nrefused of {len(prompts)}: {refused}")
    # A context counts for the first tokens only, and a tree may happen not to hang on it.
    assert all(count >= len(prompts) / 2 for count in refused.values()), refused
    assert refused["one node less"] == refused["another path"] == refused["no n-grams"] == len(prompts)


def test_their_constants_are_our_defaults():
    for level in range(8):
        assert np.isclose(Scoring().logit_weight(level), level_weight(level) * logit_weight(level))
        assert np.isclose(Scoring().continuity_weight(level), 0.5 * level_weight(level) if level else 0.0)
