"""What becomes n-gram stores: .trie files, builds that were killed; and `crossspec ngram`."""

import faulthandler
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import engines
import numpy as np
import pytest
import torch
from ngram_counts import count, random_tokens, write_trie
from typer.testing import CliRunner

import vllm_crossspec
from crossspec_tools.ngram import build as builder
from crossspec_tools.ngram.build import build, make_plan
from crossspec_tools.ngram.check import check_contents
from crossspec_tools.ngram.inputs import load_tokenizer
from crossspec_tools.ngram.lookup import look_up
from crossspec_tools.ngram.trie import import_trie
from vllm_crossspec.cli.app import app
from vllm_crossspec.ngram_store.store import LostFileError, MappedFile, open_store

POCKET = Path(vllm_crossspec.__file__).parent / "pocket" / "target"
VOCAB_SIZE = 40


def built(folder, ids, order, **settings):
    np.save(folder / "ids.npy", ids)
    path = folder / "built.safetensors"
    build(make_plan([folder / "ids.npy"], order=order, vocab_size=VOCAB_SIZE, **settings), path)
    return path


# -- .trie --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [2, 3, 4, 5])
@pytest.mark.parametrize("chunk", [1, 5, 1 << 20])
def test_an_imported_trie_is_the_store_of_its_text(tmp_path, order, chunk):
    ids = random_tokens(order, 150 if chunk == 1 else 700)
    write_trie(tmp_path / "a.trie", count(ids, order), order, seed=chunk)
    import_trie(tmp_path / "a.trie", tmp_path / "imported", vocab_size=VOCAB_SIZE, chunk=chunk)
    assert (tmp_path / "imported").read_bytes() == built(tmp_path, ids, order).read_bytes()
    assert not list(tmp_path.glob("*.work")) and not list(tmp_path.glob("*.partial"))


def test_a_count_of_zero_is_a_match_without_probability(tmp_path):
    """The reference's `reduce` can leave such nodes; their p is 0, and no shorter context is asked."""
    counts = {(1,): 5, (2,): 5, (1, 2): 0, (2, 2): 3, (1, 2, 2): 0}
    write_trie(tmp_path / "a.trie", counts, 3)
    import_trie(tmp_path / "a.trie", tmp_path / "store", vocab_size=3)
    store = open_store(tmp_path / "store")
    check_contents(store, "store")
    log_probs, matched = look_up(store, torch.tensor([[2, 1], [1, 2]]), torch.tensor([[2], [2]]))
    assert matched.tolist() == [[1], [2]]
    torch.testing.assert_close(log_probs, torch.full((2, 1), -23.02585))


def node_offsets(content):
    """Where each node of a .trie begins."""
    at, offsets = 16, []
    while at < len(content):
        offsets.append(at)
        at += 24 + 12 * struct.unpack_from("=Q", content, at + 16)[0]
    return offsets


def small_trie(path):
    write_trie(path, count(random_tokens(1, 120), 3), 3)
    return path.read_bytes()


def changed(content, at, form, value):
    return content[:at] + struct.pack(form, value) + content[at + struct.calcsize(form) :]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda c, n: b"", "too few for a .trie"),
        (lambda c, n: c[:30], "too few for a .trie"),
        (lambda c, n: c[:-1], "ends in the middle"),
        (lambda c, n: c[:-12], "more children than there is room|ends after|ends in the middle"),
        (lambda c, n: c[: n[5]], "ends after|ends in the middle|children than there is room"),
        (lambda c, n: c + bytes(24), "goes on after"),
        (lambda c, n: changed(c, 0, "=Q", 7), "its order is 7"),
        (lambda c, n: changed(c, 0, ">Q", 3), "another byte order"),
        (lambda c, n: changed(c, 0, "=Q", 2), "children, which can be 0 at most"),
        (lambda c, n: changed(c, 8, "=Q", len(n) - 1), "goes on after"),
        (lambda c, n: changed(c, 8, "=Q", len(n) + 1), "ends after"),
        (lambda c, n: changed(c, 8, "=Q", 1 << 62), "ends in the middle"),
        (lambda c, n: changed(c, n[0] + 16, "=Q", 1 << 63), "more children than there is room"),
        (lambda c, n: changed(c, n[3] + 16, "=Q", 1 << 20), "more children than there is room"),
        (lambda c, n: changed(c, n[0] + 24, "=i", -4), "has token -4"),
        (lambda c, n: changed(c, n[0] + 24, "=i", VOCAB_SIZE), "has token 40 where the vocabulary has 40"),
        (lambda c, n: changed(c, n[0] + 28, "=Q", len(n)), "names node"),
        (lambda c, n: changed(c, n[0] + 28, "=Q", 1 << 63), "names node"),
        (lambda c, n: changed(c, n[0] + 28, "=Q", 0), "disagree"),
        (lambda c, n: c[: n[0] + 24] + c[n[0] + 36 : n[0] + 48] + c[n[0] + 36 :], "two children with the same token"),
        (lambda c, n: changed(c, n[4], "=i", 39), "disagree"),
        (lambda c, n: changed(c, n[4] + 4, "=Q", 3), "disagree"),
        (lambda c, n: changed(c, n[-1] + 12, "=i", -1), "below 0 or above its parent's"),
        (lambda c, n: changed(c, n[-1] + 12, "=i", 1 << 30), "below 0 or above its parent's"),
        # The last node is taken from its parent, and a lone one stands in for it.
        (lambda c, n: changed(c, 8, "=Q", len(n) + 1) + struct.pack("=iQiQ", 1, 0, 1, 0), "hang on no other one"),
    ],
)
@pytest.mark.parametrize("chunk", [13, 1 << 20])
def test_damaged_tries(tmp_path, damage, says, chunk):
    path = tmp_path / "a.trie"
    content = small_trie(path)
    path.write_bytes(damage(content, node_offsets(content)))
    with pytest.raises(ValueError, match=says) as problem:
        import_trie(path, tmp_path / "out", vocab_size=VOCAB_SIZE, chunk=chunk)
    assert "\n" not in str(problem.value) and "a.trie" in str(problem.value)
    assert os.listdir(tmp_path) == ["a.trie"]


def test_a_trie_with_any_bit_changed_is_refused_or_sound(tmp_path):
    path, rng = tmp_path / "a.trie", np.random.default_rng(0)
    content = np.frombuffer(small_trie(path), dtype=np.uint8)
    refused = 0
    for at in rng.integers(0, len(content), 120):
        damaged = content.copy()
        damaged[at] ^= 1 << rng.integers(8)
        path.write_bytes(damaged.tobytes())
        try:
            import_trie(path, tmp_path / "out", vocab_size=VOCAB_SIZE, chunk=50)
        except ValueError as problem:
            assert "\n" not in str(problem)
            refused += 1
            continue
        check_contents(open_store(tmp_path / "out"), "out")
    assert refused > 80


@pytest.mark.skipif("CROSSSPEC_DART_REFERENCE" not in os.environ, reason="needs a checkout of fvliang/DART")
@pytest.mark.parametrize("order", [2, 3, 4, 5])
def test_the_references_own_answers(tmp_path, order):
    """Their C++, compiled: the file that it saves, imported, answers as it does."""
    from ngram_reference import load_reference

    build_folder = os.environ.get("CROSSSPEC_DART_BUILD", tmp_path / "build")
    module = load_reference(Path(os.environ["CROSSSPEC_DART_REFERENCE"]), Path(build_folder))
    ids = random_tokens(order, 3000)
    trie = module.TrieNgram(order)
    trie.add_tokens(torch.from_numpy(ids.astype(np.int32)))
    trie.save(str(tmp_path / "a.trie"))
    import_trie(tmp_path / "a.trie", tmp_path / "store", vocab_size=VOCAB_SIZE)
    assert (tmp_path / "store").read_bytes() == built(tmp_path, ids, order).read_bytes()
    rng = np.random.default_rng(order)
    contexts = torch.from_numpy(rng.integers(0, VOCAB_SIZE, (500, order - 1)).astype(np.int32))
    candidates = torch.from_numpy(rng.integers(0, VOCAB_SIZE, (500, 25)).astype(np.int32))
    probabilities, matched, _ = module.look_up(trie, contexts, candidates)
    store = open_store(tmp_path / "store")
    answers = look_up(store, contexts, candidates)
    assert torch.equal(answers.matched.int(), matched)
    atol = store.header.max_error + 2e-5
    torch.testing.assert_close(answers.log_probs, (probabilities + 1e-10).log(), rtol=0, atol=atol)


# -- killed builds ------------------------------------------------------------------------------------------------

KILLED = """
import sys
from pathlib import Path
from crossspec_tools.ngram import build as builder
pieces = []
real = builder.write_runs
def slow(batches, keys, budget, stem):
    pieces.append(stem)
    names = real(batches, keys, budget, stem)
    if len(pieces) == 4:  # its runs are written, its mark is not
        print("ready", flush=True)
        sys.stdin.read()
    return names
builder.write_runs = slow
folder = Path(sys.argv[1])
builder.build(builder.make_plan([folder / "ids.npy"], vocab_size=40, piece_size=100), folder / "out", memory=20_000)
"""


def test_a_mapped_store_that_is_cut_short_is_noticed(tmp_path):
    """Negative control: whoever reads on is ended by the system. A file that takes its name is another one."""
    path = tmp_path / "store.safetensors"
    shutil.copy(engines.NGRAM, path)
    store, file = open_store(path), MappedFile(path, "ngram.model")
    shutil.copy(engines.NGRAM, tmp_path / "new")
    os.replace(tmp_path / "new", path)
    os.truncate(path, 100)
    file.check()
    check_contents(store, "the store")
    store, file = open_store(shutil.copy(engines.NGRAM, path)), MappedFile(path, "ngram.model")
    os.truncate(path, 100)
    with pytest.raises(LostFileError, match="ngram.model .* was cut short while it was in use"):
        file.check()
    if (child := os.fork()) == 0:
        faulthandler.disable()
        check_contents(store, "the store")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGBUS


@pytest.mark.slow
def test_a_killed_build_goes_on(tmp_path, monkeypatch):
    ids = random_tokens(9, 1000)
    wanted = built(tmp_path, ids, 3).read_bytes()
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists()
    counted = []
    real = builder.count_piece
    monkeypatch.setattr(builder, "count_piece", lambda *args: counted.append(args[3]) or real(*args))
    plan = make_plan([tmp_path / "ids.npy"], vocab_size=40, piece_size=100)
    with pytest.raises(ValueError, match="holds another build, or this one with other settings"):
        build(make_plan([tmp_path / "ids.npy"], vocab_size=40, piece_size=99), tmp_path / "out")
    build(plan, tmp_path / "out")
    assert counted == [3, 4, 5, 6, 7, 8, 9]
    assert (tmp_path / "out").read_bytes() == wanted and not (tmp_path / "out.work").exists()


def test_other_inputs_are_another_build(tmp_path):
    np.save(tmp_path / "ids.npy", random_tokens(1, 200))
    plan = make_plan([tmp_path / "ids.npy"], vocab_size=40)
    builder._open_folder(tmp_path / "out.work", plan)
    time.sleep(0.01)
    np.save(tmp_path / "ids.npy", random_tokens(2, 200))
    with pytest.raises(ValueError, match="holds another build"):
        build(make_plan([tmp_path / "ids.npy"], vocab_size=40), tmp_path / "out")


# -- crossspec ngram ----------------------------------------------------------------------------------------------


def crossspec(*arguments):
    result = CliRunner().invoke(app, ["ngram", *map(str, arguments)], env={"COLUMNS": "160"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_commands(tmp_path):
    text, store = tmp_path / "a.jsonl", tmp_path / "store.safetensors"
    text.write_text("\n".join(json.dumps({"text": f"The sum is {i % 3}."}) for i in range(60)))
    shown = crossspec("build", text, "--tokenizer", POCKET, "--out", store, "--order", 4)
    assert "off by 0.000" in shown and "of 4" in shown
    shown = crossspec("info", store, "--check")
    assert "4,096 tokens" in shown and "every node" in shown and "bytes an n-gram" in shown
    shown = crossspec("query", store, "--tokenizer", POCKET, "--text", "The sum is")
    assert "'The sum is'" in shown or "sum is" in shown
    assert shown.count("0.333") == 3 or "1.0000" in shown
    eos = load_tokenizer(POCKET).token_to_id("<|im_end|>")
    shown = crossspec("query", store, "--tokens", eos, "--candidates", f"{eos},5", "--backoff", 0.4)
    assert len([line for line in shown.splitlines() if f" {eos} " in line or " 5 " in line]) >= 2
    shown = crossspec("query", store, "--tokens", "7,9")
    assert shown == "after 7, 9: no n-gram of this store ends like this\n"
    write_trie(tmp_path / "a.trie", count(random_tokens(1, 300), 3), 3)
    imported = tmp_path / "imported.safetensors"
    assert "not named" in crossspec("import", tmp_path / "a.trie", "--vocab-size", 40, "--out", imported, "--bits", 8)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["query", "{store}"], "say what came before"),
        (["query", "{store}", "--text", "a"], "--text needs --tokenizer"),
        (["query", "{store}", "--tokens", "1,x"], "--tokens 1,x: give token ids"),
        (["query", "{store}", "--tokens", "1", "--order", "4"], "choose an order of 2 to 3"),
        (["query", "{store}", "--tokens", "1", "--backoff", "1.5"], "--backoff 1.5: give a factor"),
        (["query", "{named}", "--tokens", "1", "--tokenizer", str(POCKET)], "another tokenizer"),
        (["info", "{store}.none"], "there is no such file"),
        (["build", "{store}", "--out", "{folder}/x", "--vocab-size", "4"], "name a folder, or a file that ends in"),
        (["build", "{folder}", "--out", "{folder}", "--vocab-size", "4"], "--out .*: name a file in a folder"),
        (["import", "{store}", "--out", "{folder}/x"], "a .trie does not name its tokenizer"),
        (["import", "{store}", "--out", "{folder}/x", "--vocab-size", "40"], "it is no .trie"),
    ],
)
def test_commands_refuse_in_one_sentence(tmp_path, arguments, says):
    store = built(tmp_path, random_tokens(1, 300), 3)
    other = tmp_path / "other"
    other.mkdir()
    content = json.loads((POCKET / "tokenizer.json").read_text())
    content["added_tokens"] = []
    (other / "tokenizer.json").write_text(json.dumps(content))
    named = tmp_path / "named.safetensors"
    if "{named}" in arguments:
        build(make_plan([tmp_path / "ids.npy"], tokenizer=other), named)
    given = [part.format(store=store, folder=tmp_path, named=named) for part in arguments]
    with pytest.raises(ValueError, match=says) as problem:
        crossspec(*given)
    assert "\n" not in str(problem.value)
