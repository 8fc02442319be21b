"""The n-gram store against a plain dictionary: building, lookups, the kernel, what is refused."""

import json
import math
import resource
import sys
import time

import numpy as np
import pytest
import torch
from hopper import compile_in_subprocess
from ngram_counts import count, expected, random_tokens
from safetensors.torch import load_file, save_file

from crossspec_tools.ngram.build import build, make_plan
from crossspec_tools.ngram.check import check_contents
from crossspec_tools.ngram.levels import create_file
from crossspec_tools.ngram.lookup import look_up
from vllm_crossspec.ngram_store import store as stores
from vllm_crossspec.ngram_store.kernels import look_up_level
from vllm_crossspec.ngram_store.naive import look_up_level_naive
from vllm_crossspec.ngram_store.store import FLOOR, open_store, place

VOCAB_SIZE = 40
ROUNDING = 2e-5  # float32, at 23 nats


def make_store(folder, ids, order, name="store", memory=1 << 20, vocab_size=VOCAB_SIZE, **settings):
    np.save(folder / "ids.npy", ids)
    path = folder / f"{name}.safetensors"
    plan = make_plan([folder / "ids.npy"], order=order, vocab_size=vocab_size, **settings)
    build(plan, path, memory=memory)
    return path


def questions(ids, order, seed, rows=60, columns=6):
    """Contexts that occurred, with noise, missing tokens and unknown ones among them; candidates alike."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, len(ids) - order, rows)
    windows = np.stack([ids[starts + i] for i in range(order)], axis=1)
    noise = rng.random(windows.shape) < 0.1
    windows[noise] = rng.integers(-1, VOCAB_SIZE + 2, int(noise.sum()))
    candidates = rng.integers(-1, VOCAB_SIZE + 2, (rows, columns))
    candidates[:, 0] = windows[:, -1]
    return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(candidates)


@pytest.mark.parametrize("order", [2, 3, 4, 5])
@pytest.mark.parametrize("seed", range(6))
def test_a_store_answers_as_a_dictionary(tmp_path, order, seed):
    ids = random_tokens(seed)
    counts = count(ids, order)
    # A budget that makes many runs and many parts of the merge, and pieces that cut documents.
    path = make_store(tmp_path, ids, order, memory=20_000 if seed % 2 else 1 << 20, piece_size=333)
    store = open_store(path)
    assert store.header.num_nodes == len(counts)
    assert [int((store.codes[:VOCAB_SIZE] != -1).sum()), *store.header.level_sizes[1:]] == [
        sum(len(ngram) == length for ngram in counts) for length in range(1, order + 1)
    ]
    check_contents(store, "store")
    contexts, candidates = questions(ids, order, seed)
    for backoff in (None, 0.4):
        log_probs, matched = look_up(store, contexts, candidates, backoff=backoff)
        for i, context in enumerate(contexts.tolist()):
            for j, candidate in enumerate(candidates[i].tolist()):
                log_prob, length = expected(counts, context, candidate, backoff)
                assert matched[i, j] == length
                assert abs(float(log_probs[i, j]) - log_prob) <= store.header.max_error + ROUNDING


@pytest.mark.parametrize(("size", "memory", "piece_size"), [(900, 8_000, 900), (900, 50_000, 300), (40, 1 << 24, 1)])
def test_memory_and_pieces_change_nothing(tmp_path, size, memory, piece_size):
    ids = random_tokens(1, size)
    wanted = make_store(tmp_path, ids, 3).read_bytes()
    assert make_store(tmp_path, ids, 3, "other", memory, piece_size=piece_size).read_bytes() == wanted


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["processes", "ray"])
def test_workers_change_nothing(tmp_path, monkeypatch, kind):
    if kind == "ray":
        ray = pytest.importorskip("ray")
    else:
        monkeypatch.setitem(sys.modules, "ray", None)
    ids = random_tokens(1, 900)
    wanted = make_store(tmp_path, ids, 3).read_bytes()
    plan = make_plan([tmp_path / "ids.npy"], vocab_size=VOCAB_SIZE, piece_size=200)
    build(plan, tmp_path / "workers.safetensors", workers=2)
    assert (tmp_path / "workers.safetensors").read_bytes() == wanted
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / "a.jsonl").write_text('{"tokens": [1, 99]}\n' * 90)
    plan = make_plan([tmp_path / "wrong"], vocab_size=VOCAB_SIZE, piece_size=300)
    with pytest.raises(ValueError, match="a.jsonl: token 99 is none of a vocabulary of 40"):
        build(plan, tmp_path / "wrong.safetensors", workers=2)
    if kind == "ray":
        ray.shutdown()


def test_keys_of_two_words(tmp_path):
    """Four tokens of 18 bits do not fit one word."""
    ids = random_tokens(2, 1500) * 3000
    ids[ids < 0] = -1
    path = make_store(tmp_path, ids, 5, memory=30_000, vocab_size=151_936)
    counts = count(ids, 5)
    store = open_store(path)
    check_contents(store, "store")
    assert store.header.num_nodes == len(counts) and store.tokens.dtype == torch.int32
    contexts = torch.from_numpy(np.stack([ids[i : len(ids) - 5 + i] for i in range(4)], axis=1)[::9].copy())
    candidates = torch.from_numpy(ids[4:-1][::9].copy())[:, None]
    log_probs, matched = look_up(store, contexts, candidates)
    for i, context in enumerate(contexts.tolist()):
        log_prob, length = expected(counts, context, int(candidates[i]))
        assert matched[i] == length and abs(float(log_probs[i]) - log_prob) <= store.header.max_error + ROUNDING


def test_eight_bits(tmp_path):
    ids = random_tokens(3)
    fine = open_store(make_store(tmp_path, ids, 3))
    coarse = open_store(make_store(tmp_path, ids, 3, "coarse", bits=8))
    assert coarse.codes.dtype == torch.uint8 and coarse.header.max_error < 0.05
    contexts, candidates = questions(ids, 3, 3)
    a, b = look_up(fine, contexts, candidates), look_up(coarse, contexts, candidates)
    assert torch.equal(a.matched, b.matched)
    assert (a.log_probs - b.log_probs).abs().max() <= fine.header.max_error + coarse.header.max_error + ROUNDING


def test_min_count(tmp_path):
    ids = random_tokens(4)
    counts = count(ids, 3)
    kept = {ngram: n for ngram, n in counts.items() if len(ngram) == 1 or n >= 3}
    store = open_store(make_store(tmp_path, ids, 3, min_count=3))
    check_contents(store, "store")
    assert store.header.num_nodes == len(kept) < len(counts)
    contexts, candidates = questions(ids, 3, 4)
    log_probs, matched = look_up(store, contexts, candidates)
    for i, context in enumerate(contexts.tolist()):
        for j, candidate in enumerate(candidates[i].tolist()):
            log_prob, length = expected(kept, context, candidate)
            assert matched[i, j] == length
            assert abs(float(log_probs[i, j]) - log_prob) <= store.header.max_error + ROUNDING


def test_a_lower_order_than_the_stores(tmp_path):
    ids = random_tokens(5)
    path = make_store(tmp_path, ids, 4)
    contexts, candidates = questions(ids, 4, 5)
    low = open_store(make_store(tmp_path, ids, 2, "low"))
    a, b = look_up(open_store(path, order=2), contexts, candidates), look_up(low, contexts, candidates)
    assert torch.equal(a.matched, b.matched) and torch.equal(a.log_probs, b.log_probs)
    with pytest.raises(ValueError, match="choose an order of 2 to 4"):
        open_store(path, order=5)


@pytest.mark.parametrize("ids", [[], [-1, -1], [7], [7, -1, 7]])
def test_next_to_nothing(tmp_path, ids):
    store = open_store(make_store(tmp_path, np.array(ids, dtype=np.int64), 3))
    check_contents(store, "store")
    log_probs, matched = look_up(store, torch.tensor([[7, 7]]), torch.tensor([[7, 8]]))
    assert not matched[0, 1] and log_probs[0, 1] == FLOOR
    assert not matched.any()  # no document has two tokens


# -- the kernel ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "shape", "bits"), [(2, (1, 1, 1), 16), (3, (2, 3, 25), 16), (4, (3, 1, 67), 8), (5, (1, 4, 7), 16)]
)
@pytest.mark.parametrize("backoff", [None, 0.4])
def test_kernel(tmp_path, order, shape, bits, backoff):
    ids = random_tokens(order, 800)
    store = open_store(make_store(tmp_path, ids, order, bits=bits))
    if order == 4:  # as from 2^31 nodes on
        store = store._replace(offsets=store.offsets.long())
    num_rows = shape[0] * shape[1]
    contexts, candidates = questions(ids, order, 9, num_rows, shape[2])
    extra = torch.full((num_rows, 1), 3)  # a context longer than the store's order
    contexts = torch.cat((extra, contexts), 1).view(*shape[:2], order).int()
    candidates = candidates.view(shape)
    if order == 3:  # shared by the beams: no memory of its own
        candidates = candidates[:, :1].expand(shape)
    log_probs = torch.full(shape, math.nan)
    matched = torch.full(shape, -77, dtype=torch.int8)
    look_up_level(store, contexts, candidates, log_probs, matched=matched, backoff=backoff)
    wanted = look_up_level_naive(store, contexts, candidates, backoff=backoff)
    assert torch.equal(matched, wanted[1])
    torch.testing.assert_close(log_probs, wanted[0], rtol=0, atol=ROUNDING)
    alone = torch.full(shape, math.nan)
    look_up_level(store, contexts, candidates, alone, backoff=backoff)
    assert torch.equal(alone, log_probs)
    flat = look_up(store, contexts.view(num_rows, -1), candidates.reshape(num_rows, -1), backoff=backoff)
    torch.testing.assert_close(flat.log_probs.view(shape), wanted[0], rtol=0, atol=ROUNDING)


def test_offsets_that_lead_astray_stay_inside(tmp_path):
    """A damaged store may answer anything, but no lookup may leave its arrays."""
    ids = random_tokens(6)
    store = open_store(make_store(tmp_path, ids, 3))
    for wrong in (-(1 << 30), (1 << 31) - 1):
        broken = store._replace(offsets=torch.full_like(store.offsets, wrong))
        broken.offsets[::2] = store.header.total
        contexts, candidates = questions(ids, 3, 6, rows=6)
        out = torch.full((1, *candidates.shape), math.nan)
        look_up_level(broken, contexts[None], candidates[None], out)
        look_up(broken, contexts, candidates)
        assert not out.isnan().any()


@pytest.mark.nightly
@pytest.mark.slow
def test_the_kernel_compiles_for_a_gpu(tmp_path):
    """It runs interpreted above; here Triton's compiler has to take every variant."""
    path = make_store(tmp_path, random_tokens(7, 400), 4)
    code = f"""
from hopper import compile_only
compiled = compile_only()
import torch
from pathlib import Path
from vllm_crossspec.ngram_store.kernels import look_up_level
from crossspec_tools.ngram.levels import create_file
from vllm_crossspec.ngram_store.store import open_store
for order in (2, 3, 4):
    store = open_store(Path({str(path)!r}), order=order)
    for backoff in (None, 0.4):
        for matched in (None, torch.zeros(2, 3, 25, dtype=torch.int8)):
            look_up_level(store, torch.zeros(2, 3, order - 1, dtype=torch.int32),
                          torch.zeros(2, 1, 25, dtype=torch.int64).expand(2, 3, 25), torch.zeros(2, 3, 25),
                          matched=matched, backoff=backoff)
assert len(compiled["_look_up_kernel"]) >= 8, {{name: len(found) for name, found in compiled.items()}}
"""
    compile_in_subprocess(code, tmp_path / "cache")


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("small"), random_tokens(8, 400), 3)


def one_sentence(problem):
    text = str(problem.value)
    assert "\n" not in text and len(text) < 500
    return text


@pytest.mark.parametrize("size", [0, 5, 8, 100, 2000, -1])
def test_truncated(small, tmp_path, size):
    path = tmp_path / "cut"
    path.write_bytes(small.read_bytes()[:size])
    with pytest.raises(ValueError, match="is no whole safetensors file") as problem:
        open_store(path)
    one_sentence(problem)


def rewritten(small, path, tensors=None, **metadata):
    content = small.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    header = {k: v for k, v in (header | metadata).items() if v is not None}
    save_file(load_file(small) | (tensors or {}), path, header)
    return path


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"format": None}, "no n-gram store"),
        ({"version": "2"}, "format version 2, this release reads 1"),
        ({"order": None}, "damaged header"),
        ({"order": "4"}, "contradict"),
        ({"order": "99"}, "contradict"),
        ({"scale": "NaN"}, "contradict"),
        ({"bits": "7"}, "contradict"),
        ({"vocab_size": "0"}, "contradict"),
        ({"vocab_size": '"many"'}, "damaged header|contradict"),
        ({"level_sizes": "[40, 1, 2]"}, "where its header says"),
        ({"level_sizes": "3"}, "damaged header"),
        ({"max_children": "[40, 999999999]"}, "contradict"),
        ({"num_unigrams": "-5"}, "contradict"),
    ],
)
def test_lying_metadata(small, tmp_path, metadata, says):
    with pytest.raises(ValueError, match=says) as problem:
        open_store(rewritten(small, tmp_path / "lies", **metadata))
    one_sentence(problem)


def change(store, name, index, value):
    tensor = getattr(store, name).clone()
    tensor[index] = value
    return {name: tensor}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda s: {"codes": s.codes.int()}, "`codes` is I32"),
        (lambda s: {"tokens": s.tokens[:-1].clone()}, "`tokens` is I16"),
        (lambda s: {"extra": torch.zeros(1)}, "has the tensors"),
        (lambda s: change(s, "offsets", 0, 3), "its offsets go from 3"),
        (lambda s: change(s, "offsets", -1, 3), "its offsets go from 40 to 3"),
        (lambda s: change(s, "offsets", 20, 1 << 30), "not where they can be"),
        (lambda s: change(s, "offsets", 40, s.header.total), "ends in the wrong place|not where they can be"),
        (lambda s: change(s, "tokens", 3, s.header.vocab_size), "out of order"),
        (lambda s: change(s, "tokens", 0, 39), "out of order"),
        (lambda s: change(s, "codes", 5, -2), "has no meaning"),
        (lambda s: change(s, "codes", 5, 32767), "has no meaning"),
    ],
)
def test_lying_tensors(small, tmp_path, make, says):
    path = rewritten(small, tmp_path / "lies", make(open_store(small)))
    with pytest.raises(ValueError, match=says) as problem:
        check_contents(open_store(path), str(path))
    one_sentence(problem)


def test_every_changed_bit_is_harmless_or_refused(small, tmp_path):
    """A file damaged anywhere is refused in one sentence, or opens, and then lookups stay inside it."""
    rng = np.random.default_rng(0)
    content = np.frombuffer(small.read_bytes(), dtype=np.uint8)
    contexts, candidates = questions(random_tokens(8, 400), 3, 0, 20)
    path, refused = tmp_path / "damaged", 0
    for at in [*range(0, 700, 10), *rng.integers(700, len(content), 100)]:
        damaged = content.copy()
        damaged[at] ^= 1 << rng.integers(8)
        path.write_bytes(damaged.tobytes())
        try:
            store = open_store(path)
        except ValueError as problem:
            assert "\n" not in str(problem)
            refused += 1
            continue
        assert look_up(store, contexts, candidates).log_probs.isfinite().all()
    assert refused > 30


def test_another_tokenizer_or_vocabulary(small, tmp_path):
    with pytest.raises(ValueError, match="speculative_config.ngram .* vocabulary of 40 tokens and the model has 41"):
        open_store(small, key="speculative_config.ngram", vocab_size=41)
    open_store(small, vocab_size=40, tokenizer="of the model")
    named = rewritten(small, tmp_path / "named", tokenizer=json.dumps("ab" * 32))
    open_store(named, vocab_size=64, tokenizer="ab" * 32)  # models pad their vocabulary
    with pytest.raises(ValueError, match="another tokenizer"):
        open_store(named, vocab_size=40, tokenizer="cd" * 32)
    with pytest.raises(ValueError, match="vocabulary of 40 tokens and the model has 39"):
        open_store(named, vocab_size=39, tokenizer="ab" * 32)
    with pytest.raises(ValueError, match="there is no such file"):
        open_store(tmp_path / "nowhere")


def test_tokenizer_hash_sees_ids_alone(tmp_path):
    content = {"model": {"vocab": {"a": 0, "b": 1}, "merges": []}, "added_tokens": [{"id": 2, "content": "<e>"}]}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    before = stores.tokenizer_hash(tmp_path)
    path.write_text(json.dumps(content | {"padding": 1}, indent=3))
    assert stores.tokenizer_hash(path) == before
    content["model"]["vocab"] = {"a": 1, "b": 0}
    path.write_text(json.dumps(content))
    assert stores.tokenizer_hash(path) != before
    path.write_text("{}")
    with pytest.raises(ValueError, match="is no tokenizer file"):
        stores.tokenizer_hash(path)


# -- placement ----------------------------------------------------------------------------------------------------


def test_a_copy_that_does_not_fit_stays_on_the_host(small, monkeypatch):
    store, gpu = open_store(small), torch.device("cuda", 0)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    with pytest.warns(UserWarning, match="stays in host memory: its 0.00 GiB are more than the 0.00 GiB"):
        host = place(store, "gpu", gpu, budget_bytes=store.header.num_bytes - 1)
    assert torch.equal(host.codes, store.codes)

    def no_room(tensor, device):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.Tensor, "to", no_room)
    with pytest.warns(UserWarning, match="stays in host memory: cuda:0 has no room for"):
        place(store, "gpu", gpu, budget_bytes=store.header.num_bytes)
    with pytest.warns(UserWarning, match="stays in host memory: there is no GPU"):
        assert place(store, "gpu", torch.device("cpu")) is store
    assert place(store, "host", torch.device("cpu")) is store
    with pytest.raises(ValueError, match="choose one of host, gpu"):
        place(store, "disk", torch.device("cpu"))


def test_opening_reads_next_to_nothing(tmp_path):
    """A file of more than 2 GiB, nearly all of it a hole, opens at once and takes no memory: its arrays are mapped."""
    header = stores.Header(
        order=2, vocab_size=1000, tokenizer="", num_tokens=9, num_unigrams=9, level_sizes=(1000, 600_000_000),
        max_children=(9,), bits=16, scale=0.001,
    )  # fmt: skip
    arrays = create_file(tmp_path / "large", header)
    arrays["offsets"][0], arrays["offsets"][-1] = 1000, header.total
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    store = open_store(tmp_path / "large")
    assert time.perf_counter() - start < 0.5 and header.num_bytes > 2 << 30
    assert int(store.codes[-1]) == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
