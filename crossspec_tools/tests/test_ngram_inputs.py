"""What n-grams are counted in: text, chats, token ids and a target's responses, whole and damaged; the pocket store."""

import gzip
import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from ngram_counts import count, expected

import vllm_crossspec
from crossspec_tools.ngram.build import build, make_plan
from crossspec_tools.ngram.check import check_contents
from crossspec_tools.ngram.inputs import cut, find_files, load_tokenizer, read_piece
from crossspec_tools.ngram.lookup import look_up
from vllm_crossspec.ngram_store.store import open_store, tokenizer_hash

PACKAGE = Path(vllm_crossspec.__file__).parent
POCKET = PACKAGE / "pocket" / "target"
VOCAB_SIZE = 40


def test_text_tokens_and_pieces_say_the_same(tmp_path):
    """Documents of text, the same as ids, and a row of ids with separators: one store."""
    tokenizer = load_tokenizer(POCKET)
    texts = [f"Question {i}: what is {i} plus {i * 3}?\nAn answer, {'very ' * (i % 4)}long." for i in range(30)]
    end = tokenizer.token_to_id("<|im_end|>")
    ids = [[*tokenizer.encode(text).ids, end] for text in texts]
    for name in ("text", "ids", "row", "files"):
        (tmp_path / name).mkdir()
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "text" / "a.jsonl").write_text("\n".join(lines) + "\n\n")
    (tmp_path / "ids" / "a.jsonl").write_text("\n".join(json.dumps({"tokens": row}) for row in ids))
    np.save(tmp_path / "row" / "a.npy", np.array([token for row in ids for token in [*row, -1]], dtype=np.int32))
    for i, text in enumerate(texts):
        (tmp_path / "files" / f"{i}.txt").write_text(text)
    contents = set()
    for name in ("text", "ids", "row", "files"):
        for piece_size in (1 << 20, 331):
            out = tmp_path / "out"
            plan = make_plan([tmp_path / name], tokenizer=POCKET, piece_size=piece_size)
            assert plan.eos == end and plan.vocab_size == 4096
            build(plan, out)
            contents.add(out.read_bytes())
    assert len(contents) == 1
    counts = count([token for row in ids for token in [*row, -1]], 3)
    assert open_store(out).header.num_nodes == len(counts)
    log_probs, matched = look_up(open_store(out), torch.tensor([ids[3][:2]]), torch.tensor([ids[3][2:3]]))
    log_prob, length = expected(counts, ids[3][:2], ids[3][2])
    assert matched == length == 2 and abs(float(log_probs) - log_prob) < 1e-3


def test_chats_and_generations_say_what_the_model_sees(tmp_path):
    """Rows of text, rendered; the same as `crossspec train generate` writes them; and what training encodes: one."""
    tokenizer = load_tokenizer(POCKET)
    chats = [(f"What is {i} plus {i}?", f"It is {2 * i}, {'very ' * (i % 3)}sure.") for i in range(300)]
    contents = set()
    for name, lines in (
        ("plain", [{"prompt": prompt, "response": response, "category": "math"} for prompt, response in chats]),
        ("marked", [{"prompt": f" {prompt}\n", "response": f"{answer} <|endoftext|>\n"} for prompt, answer in chats]),
        ("generated", [_generation(tokenizer, *chat) for chat in chats]),
        ("mixed", [{"prompt": chats[0][0], "response": chats[0][1]}, *(_generation(tokenizer, *c) for c in chats[1:])]),
    ):
        text = "\n".join(map(json.dumps, lines)).encode()
        for path, content in ((f"{name}.jsonl", text), (f"{name}.jsonl.gz", gzip.compress(text))):
            (tmp_path / path).write_bytes(content)
            for piece_size in (1 << 20, 500):
                build(make_plan([tmp_path / path], tokenizer=POCKET, piece_size=piece_size), tmp_path / "out")
                contents.add((tmp_path / "out").read_bytes())
    assert len(contents) == 1
    ids = [[*row["prompt_ids"], *row["response_ids"], -1] for row in (_generation(tokenizer, *chat) for chat in chats)]
    assert open_store(tmp_path / "out").header.num_nodes == len(count(list(chain.from_iterable(ids)), 3))


def _generation(tokenizer, prompt, response):
    """As `crossspec train generate` writes a response, but for the line end that a chat template puts after it."""
    ids = tokenizer.encode(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n").ids
    answer = tokenizer.encode(f"{response}<|im_end|>\n").ids
    return {"prompt_ids": ids, "response_ids": answer, "category": "math", "greedy": True}


def test_an_input_named_twice_counts_double(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"tokens": [1, 2]}')
    (tmp_path / "b.jsonl").write_text('{"tokens": [1, 3]}')
    build(make_plan([tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "a.jsonl"], vocab_size=4), tmp_path / "out")
    log_probs, _ = look_up(open_store(tmp_path / "out"), torch.tensor([[1]]), torch.tensor([[2, 3]]))
    torch.testing.assert_close(log_probs.exp(), torch.tensor([[2 / 3, 1 / 3]]), rtol=1e-3, atol=0)


def test_a_folder_is_searched_for_compressed_files_but_not_for_what_it_holds_out(tmp_path):
    for name in ("a.jsonl", "b.jsonl.gz", "c.gz", "d.json", "dev-00000.jsonl.gz", "dev-chat.jsonl", "dev-log.txt"):
        (tmp_path / name).write_bytes(b"")
    assert [path.name for path in find_files([tmp_path])] == ["a.jsonl", "b.jsonl.gz", "dev-log.txt"]
    held_out = tmp_path / "dev-00000.jsonl.gz"
    assert find_files([held_out]) == [held_out]  # asked for by name


def test_pieces_cut_files_anywhere(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"tokens": [i] * (i % 7 + 1)}) for i in range(40)))
    for size in (1, 10, 33, 10_000):
        documents = [tokens.ids.tolist() for piece in cut([path], size) for tokens in read_piece(piece, 3, None, None)]
        assert documents == [[i] * (i % 7 + 1) + [-1] for i in range(40)]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b'{"text": "no tokenizer"}\n', "holds text: --tokenizer FOLDER"),
        ("a.jsonl", b'{"tokens": [1]}\n{"tokens": [1, -2]}\n', r"a.jsonl \(line at byte 16\): a line is an object"),
        ("a.jsonl", b"nonsense\n", r"a.jsonl \(line at byte 0\) is not JSON"),
        ("a.jsonl", b"[1, 2]\n", r"a.jsonl \(line at byte 0\): a line is an object"),
        ("a.jsonl", b'{"prompt": "a", "response": "b"}\n', "holds text: --tokenizer FOLDER"),
        ("a.jsonl", b'{"prompt_ids": [1], "response_ids": [1, "2"]}\n', "a line is an object"),
        ("a.jsonl.gz", b'{"tokens": [1]}', "is no whole .gz file"),
        ("a.jsonl.gz", gzip.compress(b'{"tokens": [1]}' * 9, mtime=0)[:-12], "is no whole .gz file"),
        ("a.jsonl.gz", gzip.compress(b'{"tokens": [1]}\nx\n', mtime=0), r"a.jsonl.gz \(line at byte 16\) is not JSON"),
        ("a.jsonl", b'{"tokens": [1, 40]}\n', "a.jsonl: token 40 is none of a vocabulary of 40"),
        ("a.txt", b"words", "text files need --tokenizer"),
        ("a.npy", b"\x93NUMPY", "is no whole .npy file"),
        ("a.csv", b"1,2", "name a folder, or a file that ends in"),
    ],
)
def test_inputs_that_are_none(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=says) as problem:
        build(make_plan([tmp_path / name], vocab_size=VOCAB_SIZE), tmp_path / "out")
    assert "\n" not in str(problem.value) and not (tmp_path / "out").exists()


def test_chats_need_a_template(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((POCKET / name).read_bytes())
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "response": "b"}')
    with pytest.raises(ValueError, match=r"a.jsonl holds chats: .*model has no chat template") as problem:
        build(make_plan([tmp_path / "a.jsonl"], tokenizer=folder), tmp_path / "out")
    assert "\n" not in str(problem.value)


def test_settings_that_cannot_be(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"tokens": [1]}')
    for settings, says in (
        ({"order": 6, "vocab_size": 40}, "--order 6: choose 2 to 5"),
        ({"order": 1, "vocab_size": 40}, "--order 1: choose 2 to 5"),
        ({"bits": 4, "vocab_size": 40}, "--bits 4: choose 8 or 16"),
        ({"min_count": 0, "vocab_size": 40}, "--min-count 0"),
        ({"vocab_size": 1 << 22}, "--vocab-size 4194304"),
        ({"tokenizer": POCKET, "vocab_size": 40}, "the tokenizer has 4096 tokens"),
        ({"tokenizer": tmp_path}, "there is no tokenizer.json"),
        ({}, "token files need --tokenizer FOLDER"),
    ):
        with pytest.raises(ValueError, match=says):
            make_plan([tmp_path / "a.jsonl"], **settings)
    with pytest.raises(ValueError, match="the folder has no"):
        find_files([_empty(tmp_path)])


def _empty(folder):
    (folder / "empty").mkdir()
    return folder / "empty"


# -- the pocket's own ---------------------------------------------------------------------------------------------


def test_the_pocket_store_belongs_to_the_pocket_target():
    """It is whole, small, of that tokenizer, and knows how the target's answers begin and end."""
    path = PACKAGE / "pocket" / "ngram" / "store.safetensors"
    assert path.stat().st_size < 4_000_000
    store = open_store(path, vocab_size=4096, tokenizer=tokenizer_hash(POCKET))
    check_contents(store, str(path))
    tokenizer = load_tokenizer(POCKET)
    turn = tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n").ids
    for place in range(2, len(turn)):
        log_probs, matched = look_up(store, torch.tensor([turn[place - 2 : place]]), torch.tensor([[turn[place]]]))
        assert int(matched) == 2 and float(log_probs) > -1
    sense, nonsense = (tokenizer.encode(text).ids for text in (" one of the", " the of one"))
    scores = [look_up(store, torch.tensor([ids[:2]]), torch.tensor([ids[2:]])) for ids in (sense, nonsense)]
    assert len(sense) == len(nonsense) == 3 and float(scores[0].log_probs) > float(scores[1].log_probs) + 5
