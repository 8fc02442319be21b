"""research/papers/dart.py: its figures against plain loops, its tables against one another, and bad input."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import tiny_training
import torch
from dart_offline import Places
from made_tables import make_table, refusal
from papers import dart, lookup

from crossspec_tools.ngram.build import build, make_plan
from crossspec_tools.train.dart import train_dart
from crossspec_tools.train.generations import Generation
from vllm_crossspec.ngram_store.store import open_store

LOOP = replace(tiny_training.LOOP, steps=2)


@pytest.fixture(scope="module")
def runs(responses, target_folder, tmp_path_factory):
    """Three trainings, too short to learn much."""
    folder = tmp_path_factory.mktemp("runs")
    for name, changes, seed in (
        ("a", {"gamma": 0.6}, 0),
        ("b", {"gamma": 0.6}, 1),
        ("c", {"gamma": 0.9}, 0),
        ("unshifted", {"is_shifted": False}, 0),
    ):
        config = replace(tiny_training.DART, draft_vocab_size=tiny_training.VOCAB, num_drafts=6, **changes)
        train_dart(responses, target_folder, folder / name, config, replace(LOOP, seed=seed))
    return folder


@pytest.fixture(scope="module")
def store(responses, target_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("store") / "store.safetensors"
    build(make_plan(sorted(responses.glob("*.jsonl.gz")), tokenizer=target_folder), out)
    return out


def test_hits_by_text():
    tokens = torch.tensor([[[1, 2], [3, 4]], [[1, 2], [3, 4]], [[5, 6], [7, 8]]])
    truth = torch.tensor([[1, 4], [9, 3], [6, 9]])
    count = torch.tensor([2, 1])
    places = Places(tokens.float(), tokens, truth, truth, torch.tensor([0, 2]), count, ["a", "b"])
    for position, most, expected in ((0, 1, [1, 0]), (0, 2, [1, 1]), (1, 1, [1, 0]), (1, 2, [2, 0])):
        found = dart.hits(places, position, most)
        assert found.tokens.tolist() == expected and found.rounds.tolist() == [2, 1]
    assert dart.percent(dart.hits(places, 1, 2)).seen == pytest.approx(200 / 3)


def test_ngram_hits_are_those_of_counts(tmp_path):
    """Of whatever followed the longest known context; what followed none is no hit."""
    ids = np.random.default_rng(0).integers(0, 9, 300)
    ids[ids == 8] = 3  # 8 stays unseen
    np.save(tmp_path / "ids.npy", ids)
    build(make_plan([tmp_path / "ids.npy"], vocab_size=9), tmp_path / "store")
    store, text = open_store(tmp_path / "store"), ids.tolist()
    pairs = [[a, b] for a in range(9) for b in range(9)]
    follow = {
        (a, b): Counter(z for x, y, z in zip(text, text[1:], text[2:], strict=False) if (x, y) == (a, b))
        for a, b in pairs
    }
    single = {b: Counter(z for y, z in pairwise(text) if y == b) for b in range(9)}
    truth, expected = [], []
    for a, b in pairs:
        counts = follow[a, b] or single[b]
        best = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        is_clear = len(best) > 1 and best[0][1] > best[1][1]
        truth.append(best[0][0] if is_clear else 8)
        expected.append(int(is_clear))
    nothing, count = torch.zeros(81, 1, 1), torch.ones(81, dtype=torch.int64)
    contexts, truth = torch.tensor(pairs), torch.tensor(truth)[:, None]
    places = Places(nothing, nothing, contexts, truth, torch.arange(81), count, ["a"] * 81)
    found = dart.ngram_hits(places, store, 1)
    assert found.tokens.tolist() == expected and 10 < sum(expected) < 81


def test_a_lookup_counts_the_rounds_of_a_drafter_of_that_depth():
    rows = [Generation([1, 2, 3], [1, 2, 3] * 4 + [9], "a", True)]
    make = lambda depth: lookup.Ours(0, depth, False, lookup.NGRAM)  # noqa: E731
    found = lookup.walk(make(4), rows, 4)
    # Places 0 to 8 may begin a round: at 0 nothing is known (two tokens are compared), at 1 and 6 four drafts hold.
    assert found.rounds.tolist() == [3] and found.tokens.tolist() == [11]
    # Places 0 to 10: at 1, 4 and 7 two drafts hold, at 10 the first of them.
    found = lookup.walk(make(2), rows, 2)
    assert found.rounds.tolist() == [5] and found.tokens.tolist() == [12]


def rows_of(folder, *words):
    return make_table(folder, "dart", *words)[0]


def test_the_tables(tmp_path, responses, target_folder, runs, store):
    texts = ["--responses", responses, "--target", target_folder, "--store", store, "--nodes", 12]
    a, b, c, unshifted = (runs / name for name in ("a", "b", "c", "unshifted"))
    first = rows_of(tmp_path, "table-1", *texts, "--drafter", a / "model")
    second = rows_of(tmp_path, "table-2", *texts, "--drafter", a / "model")
    assert [row["all"] for row in second[:2]] == [row["all"] for row in first[-2:]]
    third = rows_of(tmp_path, "table-3", *texts, "--runs", a, b, c, unshifted)
    fourth = rows_of(tmp_path, "table-4", *texts, "--runs", a, b)
    alone = rows_of(tmp_path, "table-4", *texts, "--runs", a)
    assert [round(x, 9) for (x,) in alone[0]["tau_of_each"]] == [round(row["all"][0], 9) for row in second[:2]]
    assert [row["drafters"] for row in third[:4]] == [1, 1, 3, 3] and fourth[0]["drafters"] == 2
    together = rows_of(tmp_path, "table-3", *texts, "--runs", a / "model", b)
    assert together[0]["alpha"] == fourth[0]["alpha"][:3] != alone[0]["alpha"][:3]
    assert all(high[0] >= low[0] for low, high in zip(third[2]["alpha"], third[3]["alpha"], strict=True))
    assert third[-1]["alpha"][0][0] > 50  # n-grams that have seen the text


def test_no_ngram_is_of_the_kind_that_is_left_out(tmp_path, monkeypatch, responses, target_folder, runs, store):
    words = ["--responses", responses, "--target", target_folder, "--store", store, "--nodes", 12]
    words += ["--drafter", runs / "a" / "model"]
    asked, counted = [], dart.counted
    monkeypatch.setattr(dart, "counted", lambda rows, *given: asked.append(rows) or counted(rows, *given))
    found = {row["texts"]: row for row in rows_of(tmp_path, "left-out", *words)}
    everything, *parts = asked
    for kind, (others, as_many) in zip(("chat", "math"), (parts[:2], parts[2:]), strict=True):
        assert {row.category for row in others} == {"chat", "math"} - {kind}
        assert len(as_many) == len(others) < len(everything) and {row.category for row in as_many} == {"chat", "math"}
    plain, *_ = rows_of(tmp_path, "table-2", *words)
    assert all(found[kind]["without n-grams"] == plain[kind] for kind in ("all", "chat", "math"))


def test_bad_input_is_one_sentence(tmp_path, responses, target_folder, runs, store):
    texts = ["--responses", responses, "--target", target_folder, "--store", store]
    for words, sentence in (
        (["table-2", "--drafter", tmp_path], f"--drafter {tmp_path} has no config.json; give the folder of a DART"),
        (["table-2", "--split", "test"], f"--responses {responses}: no test-*.jsonl.gz"),
        (["table-2", "--sampled"], "no sampled response of dev has over 8 tokens"),
        (["table-3", "--runs", tmp_path], f"--runs {tmp_path} is no finished --out of `crossspec train dart`"),
        (["table-4", "--runs", runs / "a", runs / "unshifted"], "Table 4 is of shifted drafters alone"),
        (["table-4", "--runs", runs / "a" / "model"], "Table 4 needs recipe.json, which says gamma"),
    ):
        assert sentence in refusal("dart", words[0], *texts, *words[1:])
