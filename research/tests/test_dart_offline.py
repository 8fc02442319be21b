"""research/dart_offline.py and its table of n-grams: against plain loops, and against what training measures."""

import argparse
from dataclasses import replace

import dart_offline
import numpy as np
import pytest
import texts
import tiny_training
import torch
from intervals import Walk
from made_tables import make_table, refusal
from rich.progress import Progress

from crossspec_tools.ngram.build import build, make_plan
from crossspec_tools.train.dart import drafts, train_dart
from crossspec_tools.train.drafter_run import offline_acceptance
from crossspec_tools.train.generations import collate, read_generations
from vllm_crossspec.ngram_store.store import open_store
from vllm_crossspec.types import TokenTree

CONFIG = replace(tiny_training.DART, draft_vocab_size=tiny_training.VOCAB, bfloat16=True)


@pytest.fixture(scope="module")
def target(target_folder):
    return texts.open_target(target_folder, bfloat16=True)


@pytest.fixture(scope="module")
def drafter_folder(responses, target_folder, tmp_path_factory):
    """Trained until it is right now and then."""
    out = tmp_path_factory.mktemp("drafter")
    train_dart(responses, target_folder, out, CONFIG, replace(tiny_training.LOOP, steps=40))
    return out / "model"


@pytest.fixture(scope="module")
def drafter(drafter_folder, target):
    return dart_offline.load_drafter(drafter_folder, target)


def greedy_rows(responses):
    rows = read_generations(responses, "dev", tiny_training.VOCAB)
    return [row for row in rows if len(row.response_ids) > CONFIG.num_drafts]


def random_trees(rng, num_reqs, num_nodes, vocab_size):
    """Children of one node with different tokens, as builders make them; rows past the size are left over."""
    tree = texts.empty_tree(num_reqs, num_nodes)
    for row in range(num_reqs):
        seen = set()
        for node in range(num_nodes):
            parent, token = int(rng.integers(0, node + 1)), int(rng.integers(0, vocab_size))
            while (parent, token) in seen:
                parent, token = int(rng.integers(0, node + 1)), int(rng.integers(0, vocab_size))
            seen.add((parent, token))
            tree.parents[row, node], tree.tokens[row, node] = parent, token
        tree.sizes[row] = rng.integers(0, num_nodes + 1)
    return tree


def accepted_by_hand(tree: TokenTree, row, truth):
    size = int(tree.sizes[row])
    children = {(int(tree.parents[row, i]), int(tree.tokens[row, i])): i + 1 for i in range(size)}
    at = length = 0
    for token in truth.tolist():
        if (at, token) not in children:
            break
        at, length = children[at, token], length + 1
    return length


def test_accepted_paths():
    rng = np.random.default_rng(0)
    lengths = set()
    for num_nodes in (1, 5, 30):
        tree = random_trees(rng, 200, num_nodes, 4)
        truth = torch.from_numpy(rng.integers(0, 4, (200, 5)))
        wanted = [accepted_by_hand(tree, row, truth[row]) for row in range(200)]
        assert texts.accepted(tree, truth).tolist() == wanted
        lengths |= set(wanted)
    assert lengths >= {0, 1, 2, 3}


@pytest.mark.parametrize("size", [6, 40, 3000])
def test_of_equal_tokens_the_first_comes_first(size):
    """Values in steps, so that many are equal. Which of those at the list's end are taken is left open."""
    values = torch.randint(0, size // 2, (200, size), generator=torch.Generator().manual_seed(size)).float()
    found, tokens = dart_offline.likeliest(values, 5)
    best, order = values.sort(dim=1, descending=True, stable=True)
    assert torch.equal(found, best[:, :5]) and torch.equal(values.gather(1, tokens), found)
    assert torch.equal(tokens[:, 0], values.argmax(1))
    inside = found > best[:, 5:6]
    assert torch.equal(tokens[inside], order[:, :5][inside]) and inside.any()


def test_rounds_go_through_every_response():
    rng = np.random.default_rng(1)
    count = torch.tensor([7, 1, 12, 3])
    hits = torch.from_numpy(rng.integers(0, 4, int(count.sum())))
    nothing = torch.zeros(int(count.sum()), 1, 1)
    places = dart_offline.Places(nothing, nothing, nothing, nothing, count.cumsum(0) - count, count, ["a"] * 4)
    found = dart_offline.walk(places, lambda at: hits[at])
    for row, (first, total) in enumerate(zip(places.first.tolist(), count.tolist(), strict=True)):
        at = rounds = 0
        while at < total:
            at += int(hits[first + at]) + 1
            rounds += 1
        assert (found.tokens[row], found.rounds[row]) == (at, rounds)


@pytest.mark.slow
def test_places_are_where_rounds_begin(responses, target, drafter):
    """Contexts, continuations and marginals of every place, against each response on its own."""
    rows = greedy_rows(responses)
    with Progress(disable=True) as progress:
        places = dart_offline.marginals(drafter, target, rows, 5, 2, progress)
    assert places.log_probs.shape == (int(places.count.sum()), CONFIG.num_drafts, 5)
    by_length = sorted(rows, key=lambda row: len(row.prompt_ids) + len(row.response_ids))
    for number, row in enumerate(by_length):
        ids, start = torch.tensor(row.prompt_ids + row.response_ids), len(row.prompt_ids)
        assert int(places.count[number]) == len(row.response_ids) - CONFIG.num_drafts
        batch = collate([row])
        states = target.states(batch.tokens)
        for step in range(int(places.count[number])):
            place, last = int(places.first[number]) + step, start + step
            assert places.contexts[place].tolist() == ids[last - 1 : last + 1].tolist()
            assert places.truth[place].tolist() == ids[last + 1 : last + 1 + CONFIG.num_drafts].tolist()
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                logits = drafter(states, batch.tokens, target.embedding, torch.tensor([[last - 1]]))
            log_probs = torch.full((CONFIG.num_drafts, tiny_training.VOCAB), -torch.inf)
            log_probs[:, drafter.kept] = logits[0, 0].float().log_softmax(-1)
            # bfloat16 logits of about 4, padded or not: an ulp is 0.016 to 0.03.
            torch.testing.assert_close(
                places.log_probs[place], log_probs.gather(1, places.tokens[place]), rtol=0, atol=0.1
            )
    short = dart_offline._around(torch.tensor([[4, 5, 6]]), torch.tensor([[0, 2]]), torch.arange(-1, 1))
    assert short.tolist() == [[[-1, 4], [5, 6]]]


def test_rates_are_of_all_responses_and_of_each_category():
    found = texts.by_category(Walk(np.array([12, 20, 9]), np.array([4, 10, 3])), ["b", "a", "b"])
    assert {name: interval.seen for name, interval in found.items()} == {"all": 41 / 17, "a": 2.0, "b": 3.0}


def cycle(factor, start, length):
    ids = [start]
    while len(ids) < length:
        ids.append((factor * ids[-1] + 3) % 47)
    return ids


@pytest.mark.parametrize("kind", ["continuity", "best_first"])
def test_a_store_of_the_text_finds_its_paths(tmp_path, kind):
    """A drafter that knows eight equally likely candidates a position: only n-grams tell which go together."""
    rng = np.random.default_rng(0)
    texts = [cycle(5, int(start), 26) for start in rng.integers(0, 40, 6)]
    windows = [text[at - 1 : at + 5] for text in texts for at in range(1, 22)]
    ids = torch.tensor(windows)
    tokens = torch.stack([torch.from_numpy(rng.permutation(47)) for _ in range(ids.shape[0] * 4)])[:, :8]
    tokens = tokens.view(-1, 4, 8)
    tokens = torch.where((tokens == ids[:, 2:, None]).any(2, keepdim=True), 47, tokens)
    tokens.scatter_(2, torch.from_numpy(rng.integers(0, 8, (*tokens.shape[:2], 1))), ids[:, 2:, None])
    count = torch.full((6,), 21)
    log_probs = torch.full(tokens.shape, 1 / 8).log()
    places = dart_offline.Places(log_probs, tokens, ids[:, :2], ids[:, 2:], count.cumsum(0) - count, count, ["a"] * 6)
    rates = {}
    for name, factor in (("none", None), ("text", 5), ("other", 10)):
        store = None
        if factor is not None:
            np.save(tmp_path / "ids.npy", np.array(cycle(factor, 1, 60)))
            build(make_plan([tmp_path / "ids.npy"], vocab_size=48), tmp_path / name)
            store = open_store(tmp_path / name)
        options = argparse.Namespace(nodes=14, beam=8, backoff=None, logit_decay=0.9, level_decay=0.7)
        result = dart_offline.tree_walk(places, kind, 0.5 if store is not None else 0.0, store, options)
        rates[name] = result.tokens.sum() / result.rounds.sum()
    assert rates["text"] == 5 and rates["none"] < 3 and rates["other"] < 3


def test_the_table(responses, target_folder, target, drafter, drafter_folder, tmp_path):
    """Its chain accepts what training itself measures; gains are of the rates that it shows."""
    helpful, useless = tmp_path / "helpful.safetensors", tmp_path / "useless.safetensors"
    build(make_plan(sorted(responses.glob("dev-*.jsonl.gz")), tokenizer=target_folder), helpful)
    ids = np.random.default_rng(0).integers(0, tiny_training.VOCAB, 4000)
    np.save(tmp_path / "ids.npy", ids)
    build(make_plan([tmp_path / "ids.npy"], tokenizer=target_folder), useless)
    options = ["--responses", responses, "--target", target_folder, "--drafter", drafter_folder, "--weights", "1"]
    found, shown = make_table(tmp_path, "dart", "ngrams", *options, "--store", helpful, useless, "--nodes", 12)
    rows = {(row["tree"], row["store"]): row for row in found}
    assert len(rows) == 7 and "tokens a round" in shown
    draft = lambda batch, anchors: drafts(drafter, target, batch, anchors)  # noqa: E731
    read = [row for row in greedy_rows(responses) if len(row.response_ids) > 8]
    chain = offline_acceptance(drafter, target, read, draft, drafter.num_drafts)
    found = rows["chain", None]["tokens_per_round"]
    assert found["all"] == pytest.approx(chain["dev_accept"], abs=1e-3)
    assert found["chat"] == pytest.approx(chain["dev_accept_chat"], abs=1e-3)
    for tree in ("continuity", "best_first"):
        base = rows[tree, None]
        assert base["gain_percent"] is None and base["rounds"] > 0
        for store in (str(helpful), str(useless)):
            seen, low, high = rows[tree, store]["gain_percent"]
            rates = [row["tokens_per_round"]["all"] for row in (rows[tree, store], base)]
            assert low <= seen <= high and seen == pytest.approx(100 * (rates[0] / rates[1] - 1), abs=0.05)


def test_what_cannot_be_measured(responses, target_folder, drafter_folder, tmp_path):
    (tmp_path / "store").write_bytes(b"")
    given = {"--responses": responses, "--target": target_folder, "--drafter": drafter_folder}
    store = tmp_path / "good.safetensors"
    build(make_plan(sorted(responses.glob("dev-*.jsonl.gz")), tokenizer=target_folder), store)
    for change, says in (
        ({"--responses": tmp_path}, "no dev-*.jsonl.gz"),
        ({"--drafter": tmp_path}, "--drafter"),
        ({"--store": tmp_path / "store"}, "--store"),
        ({"--target": tmp_path}, "--target"),
        ({"--trees": "chain"}, "--trees chain: choose of"),
        ({"--weights": "a"}, "--weights a: give"),
    ):
        options = [str(part) for item in {**given, "--store": store, **change}.items() for part in item]
        assert says in refusal("dart", "ngrams", *options)
