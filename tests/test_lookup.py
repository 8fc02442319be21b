"""Matches in a request's own text and in earlier outputs, and trees of what followed them, against plain loops."""

import math
import random
import threading
import time

import numpy as np
import pytest
import torch

from vllm_crossspec.drafters.lookup import corpus as corpus_module
from vllm_crossspec.drafters.lookup.corpus import Corpus, places_in_order
from vllm_crossspec.drafters.lookup.kernels import NO_TOKEN, Matches, Texts, corpus_matches, own_matches
from vllm_crossspec.drafters.lookup.naive import Match, corpus_matches_naive, match_tree_naive, own_matches_naive
from vllm_crossspec.drafters.lookup.trees import match_tree
from vllm_crossspec.types import TokenTree

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS, LONGEST = 6, 100


def texts_of(texts, slots):
    """These texts in these slots, and other text behind their ends; the batch names a padding row, too."""
    ids = torch.randint(0, 3, (SLOTS, LONGEST), dtype=torch.int32)
    computed = torch.zeros(SLOTS, dtype=torch.int32)
    for slot, text in zip(slots, texts, strict=True):
        ids[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
        computed[slot] = len(text) - 1
    mapping = torch.tensor([*slots, -1], dtype=torch.int32)
    return Texts(*(part.to(DEVICE) for part in (mapping, computed, ids)))


def empty(num_reqs, num_matches, depth):
    return Matches(
        torch.full((num_reqs, num_matches, depth), 99, dtype=torch.int32, device=DEVICE),
        torch.full((num_reqs, num_matches), 99, dtype=torch.int32, device=DEVICE),
        torch.full((num_reqs, num_matches), 99.0, device=DEVICE),
    )


def found_in(matches, row, columns):
    """The matches of a request as the naive searches give them."""
    lengths, counts = matches.lengths[row, columns].tolist(), matches.counts[row, columns].tolist()
    continuations = matches.continuations[row, columns].tolist()
    rows = zip(lengths, continuations, counts, strict=True)
    return [Match(n, tuple(t for t in tokens if t != NO_TOKEN), count) for n, tokens, count in rows if n]


@pytest.mark.parametrize("seed", range(6))
def test_own_matches(seed):
    generator = random.Random(seed)
    texts = [[generator.randrange(3) for _ in range(n)] for n in (1, 2, 3, 40, LONGEST)]
    sizes = {"max_match": 4, "min_match": 2, "num_matches": 5}
    out = empty(len(texts) + 1, 5, 7)
    own_matches(texts_of(texts, [4, 0, 2, 5, 1]), **sizes, out=out)
    for row, text in enumerate(texts):
        assert found_in(out, row, slice(None)) == own_matches_naive(text, **sizes, depth=7)
    assert not found_in(out, len(texts), slice(None)), "padding"


def test_what_follows_a_match_near_the_end_goes_on_with_its_period():
    out = empty(2, 1, 6)
    own_matches(texts_of([[7, 1, 2, 3, 1, 2, 3]], [3]), max_match=4, min_match=2, num_matches=1, out=out)
    assert out.continuations[0, 0].tolist() == [1, 2, 3, 1, 2, 3] and out.lengths[0, 0] == 3


def corpus_of(outputs):
    tokens = np.array([t for output in outputs for t in (*output, NO_TOKEN)], dtype=np.int32)
    return torch.from_numpy(tokens).to(DEVICE), torch.from_numpy(places_in_order(tokens, 8)).to(DEVICE)


@pytest.mark.parametrize("seed", range(6))
def test_corpus_matches(seed):
    generator = random.Random(seed)
    outputs = [[generator.randrange(4) for _ in range(generator.randrange(1, 30))] for _ in range(20)]
    queries = [[generator.randrange(4) for _ in range(n)] for n in (1, 2, 5, 60)] + [[9, 9, 9]]
    out = empty(len(queries) + 1, 70, 5)
    corpus_matches(
        texts_of(queries, [0, 1, 2, 3, 4]),
        corpus_of(outputs),
        max_match=8,
        min_match=2,
        first_match=6,
        num_matches=64,
        out=out,
    )
    for row, text in enumerate(queries):
        expected = corpus_matches_naive(text, outputs, max_match=8, min_match=2, depth=5)
        assert sorted(found_in(out, row, slice(6, None))) == sorted(expected)
    assert (out.lengths[:, :6] == 99).all(), "the places of own matches"
    assert any(len(found_in(out, row, slice(6, None))) > 1 for row in range(len(queries)))


def test_of_many_places_some_stand_for_all():
    outputs = [[1, 2, 3 + i % 2] for i in range(40)]
    out = empty(2, 4, 2)
    sizes = {"max_match": 8, "min_match": 1, "first_match": 0, "num_matches": 4, "out": out}
    corpus_matches(texts_of([[1, 2]], [0]), corpus_of(outputs), **sizes)
    found = found_in(out, 0, slice(None))
    assert sum(match.places for match in found) == 40 and {match.length for match in found} == {2}


def tree_of(out, row):
    """The nodes as paths, with their log-probabilities, in their order."""
    paths, found = {0: ()}, {}
    for node in range(int(out.sizes[row])):
        parent = int(out.parents[row, node])
        assert parent <= node, "a parent comes first"
        paths[node + 1] = (*paths[parent], int(out.tokens[row, node]))
        found[paths[node + 1]] = float(out.log_probs[row, node])
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("num_nodes", [1, 9, 60])
def test_match_tree(seed, num_nodes):
    generator = random.Random(seed)
    num_matches, depth = generator.choice([(1, 1), (3, 5), (8, 16), (16, 7), (32, 16)])
    rows = []
    for _ in range(4):
        matches = []
        for _ in range(generator.randrange(num_matches + 1)):
            length = generator.randrange(1, 20)
            ends = generator.randrange(1, depth + 1)
            matches.append(
                Match(length, tuple(generator.randrange(2) for _ in range(ends)), generator.choice([1, 2.5]))
            )
        rows.append(matches)
    found = empty(4, num_matches, depth)
    found.continuations.fill_(NO_TOKEN)
    found.lengths.zero_()
    for row, matches in enumerate(rows):
        for number, match in enumerate(matches):
            found.lengths[row, number], found.counts[row, number] = match.length, match.places
            found.continuations[row, number, : len(match.continuation)] = torch.tensor(match.continuation)
    width = num_nodes + 3
    out = TokenTree(
        torch.full((4, width), 99, device=DEVICE),
        torch.full((4, width), 99, dtype=torch.int32, device=DEVICE),
        torch.full((4, width), 99.0, device=DEVICE),
        torch.full((4,), 99, dtype=torch.int32, device=DEVICE),
    )
    match_tree(found, max_match=16, num_nodes=num_nodes, out=out)
    for row, matches in enumerate(rows):
        expected, tree = match_tree_naive(matches, 16, num_nodes), tree_of(out, row)
        # Which of two comes first that are as likely is the order of additions, no more.
        assert [*tree.values()] == pytest.approx([*expected.values()], abs=1e-5)
        everything = match_tree_naive(matches, 16, 1 << 20)
        assert tree == pytest.approx({path: everything[path] for path in tree}, abs=1e-5)
        size = len(tree)
        assert not out.tokens[row, size:].any() and not out.parents[row, size:].any()
        assert (out.log_probs[row, size:] == -math.inf).all()


def test_a_place_is_right_as_often_as_its_length_says():
    """Of m tokens that agree, d more come with a chance of m / (m + d); of all that is compared, of three times m."""
    found = empty(3, 1, 4)
    found.continuations.copy_(torch.arange(4))
    found.lengths.copy_(torch.tensor([[2], [7], [8]]))
    found.counts.fill_(1.0)
    out = TokenTree(
        *(torch.zeros(3, 4, dtype=d, device=DEVICE) for d in (torch.int64, torch.int32, torch.float32)),
        sizes=torch.zeros(3, dtype=torch.int32, device=DEVICE),
    )
    match_tree(found, max_match=8, num_nodes=4, out=out)
    expected = [[m / (m + d) for d in range(1, 5)] for m in (2, 7, 24)]
    assert out.log_probs.exp().tolist() == [pytest.approx(row, abs=1e-6) for row in expected]


# -- the corpus -------------------------------------------------------------------------------------------------------


def settle(corpus):
    """Wait until all outputs are published."""
    while corpus._waiting.unfinished_tasks or corpus._new:
        time.sleep(0.001)


def test_the_oldest_outputs_go_and_the_bound_holds():
    corpus = Corpus(100, 8, torch.device("cpu"))
    for number in range(60):
        corpus.add(lambda number=number: [np.full(9, number, dtype=np.int32)])
    settle(corpus)
    tokens = corpus.version.tokens
    assert len(tokens) == 100 and set(tokens.tolist()) == {NO_TOKEN, *range(50, 60)}
    assert corpus.num_evicted == 50
    corpus.add(lambda: [np.arange(500, dtype=np.int32)])  # longer than all of it: its end
    settle(corpus)
    assert corpus.version.tokens.tolist() == [*range(401, 500), NO_TOKEN]
    corpus.close()


def test_whoever_adds_never_waits_and_a_failing_one_is_survived(caplog):
    corpus, gate = Corpus(1000, 8, torch.device("cpu")), threading.Event()

    def blocked():
        gate.wait()
        raise RuntimeError("the device is gone")

    for _ in range(2000):  # more than wait at most; none of it blocks
        corpus.add(blocked)
    assert corpus.version is None
    gate.set()
    settle(corpus)
    corpus.add(lambda: [np.arange(5, dtype=np.int32), np.arange(1, dtype=np.int32)])
    settle(corpus)
    assert corpus.version.tokens.tolist() == [0, 1, 2, 3, 4, NO_TOKEN] and "were not taken in" in caplog.text
    corpus.close()


def test_a_device_without_room_for_a_version_is_survived(monkeypatch, caplog):
    makes, has_room = Corpus._make_version, False

    def make(self):
        if not has_room:
            raise torch.OutOfMemoryError("none left")
        makes(self)

    monkeypatch.setattr(Corpus, "_make_version", make)
    monkeypatch.setattr(corpus_module, "GROWTH", 0)  # every version comes after a rest
    corpus = Corpus(1000, 8, torch.device("cpu"))
    corpus.add(lambda: [np.arange(5, dtype=np.int32)])
    settle(corpus)
    for _ in range(1000):  # the thread says so a moment later
        if "none left" in caplog.text:
            break
        time.sleep(0.01)
    assert corpus.version is None and "none left" in caplog.text
    has_room = True
    corpus.add(lambda: [np.arange(3, dtype=np.int32)])
    settle(corpus)
    assert corpus.version.tokens.tolist() == [0, 1, 2, 3, 4, NO_TOKEN, 0, 1, 2, NO_TOKEN]
    corpus.close()


def test_the_thread_has_a_stream_of_its_own(monkeypatch):
    asked = []
    monkeypatch.setattr(
        corpus_module, "thread_stream", lambda device: asked.append((threading.current_thread().name, device))
    )
    corpus = Corpus(100, 8, torch.device("cpu"))
    corpus.add(lambda: [np.arange(5, dtype=np.int32)])
    settle(corpus)
    corpus.close()
    assert asked == [("crossspec-corpus", torch.device("cpu"))]
