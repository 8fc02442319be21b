"""Records of every drafter at every token: what is read off a text, what is on disk, and real engines in the end."""

import contextlib
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from commands import crossspec
from safetensors import safe_open
from safetensors.torch import save
from steps import random_parents

from crossspec_tools.records import cli_collect as collect
from crossspec_tools.records.shards import shard_path
from crossspec_tools.records.simulate import always, walk
from crossspec_tools.train import records
from crossspec_tools.train.records import NO_TOKEN, Answer, Facts, acceptance_lengths, assemble
from crossspec_tools.train.router import trajectories
from vllm_crossspec.cli import app

FACTS = Facts("a target", 4, ("tree", "chain"), (3, 2))


def accepted_slowly(tokens: list[int], parents: list[int], following: list[int]) -> int:
    """1 + the longest path from the root that the following tokens spell, found node by node."""
    best = 0
    for node in range(len(tokens)):
        path, row = [], node + 1
        while row > 0:
            path.append(tokens[row - 1])
            row = parents[row - 1]
        path.reverse()
        if path == following[: len(path)]:
            best = max(best, len(path))
    return 1 + best


@pytest.mark.parametrize("seed", range(20))
def test_acceptance_is_the_longest_path_that_the_text_spells(seed):
    rng = random.Random(seed)
    num_nodes, depth = rng.randrange(1, 20), rng.randrange(1, 7)
    trees = [random_parents(rng, num_nodes, depth) for _ in range(9)]
    # A small vocabulary, so that paths are often right; dead nodes at the end.
    tokens = [[rng.randrange(3) if i < num_nodes - rng.randrange(4) else -1 for i in range(num_nodes)] for _ in trees]
    following = [[rng.randrange(3) for _ in range(rng.randrange(depth + 1))] for _ in trees]
    truth = [text + [NO_TOKEN] * (depth - len(text)) for text in following]
    found = acceptance_lengths(
        torch.tensor(tokens), torch.tensor(trees, dtype=torch.uint8), torch.tensor(truth, dtype=torch.int64)
    )
    assert found.tolist() == [accepted_slowly(*case) for case in zip(tokens, trees, following, strict=True)]
    chain = list(range(num_nodes))
    found = acceptance_lengths(torch.tensor(tokens), None, torch.tensor(truth, dtype=torch.int64))
    assert found.tolist() == [
        accepted_slowly(drafted, chain, text) for drafted, text in zip(tokens, following, strict=True)
    ]


def made_up_steps(answers: dict[int, Answer], seed: int) -> list[tuple[list[str], bytes]]:
    """What an engine would have recorded for these texts, in pieces and in no order, with what must be dropped."""
    rng = random.Random(seed)
    rows = []
    for number, answer in answers.items():
        for index in range(-2, len(answer.token_ids) + 2):  # inside the prompt, and computed ahead past the end
            rows.append((number, index))
    rows += rng.sample(rows, 3)  # recorded again after a preemption
    rng.shuffle(rows)
    pieces = []
    for start in range(0, len(rows), 7):
        part = rows[start : start + 7]
        ids = [f"{number}-{rng.randrange(16**8):08x}" for number, _ in part]
        tensors = {
            "position": torch.tensor([answers[n].num_prompt_tokens + i for n, i in part]),
            "num_sampled": torch.tensor([int(i >= 0) for _, i in part], dtype=torch.int32),
            "hidden": torch.tensor([[n, i, 0.5, -1.0] for n, i in part], dtype=torch.float32),
            "entropy": torch.tensor([n + i / 100 for n, i in part]),
            "tokens.tree": torch.tensor([draft_of(n, i) for n, i in part], dtype=torch.int32),
            "parents.tree": torch.tensor([[0, 1, 0, 3, 4]] * len(part), dtype=torch.uint8),
            "tokens.chain": torch.tensor([draft_of(n, i)[:2] for n, i in part], dtype=torch.int32),
            "forecast.chain": torch.tensor([n + i / 64 for n, i in part]),
        }
        pieces.append((ids, save(tensors)))
    return pieces


def draft_of(number: int, index: int) -> list[int]:
    """The tree that is drafted at a place; the same whenever it is asked for."""
    rng = random.Random(number * 1000 + index)
    return [rng.randrange(3) for _ in range(4)] + [-1]


@pytest.fixture
def answers() -> dict[int, Answer]:
    rng = random.Random(5)
    lengths = {4: 9, 0: 1, 7: 14, 2: 2}
    return {
        number: Answer("code" if number % 2 else "chat", 3 + number, [rng.randrange(3) for _ in range(count)], "stop")
        for number, count in lengths.items()
    }


def test_a_shard_holds_every_token_but_each_texts_last(tmp_path, answers):
    tensors = assemble(made_up_steps(answers, 1), answers, FACTS)
    expected = [(n, i) for n in sorted(answers) for i in range(len(answers[n].token_ids) - 1)]
    assert list(zip(tensors["text"].tolist(), tensors["position"].tolist(), strict=True)) == expected
    assert tensors["hidden"][:, :2].tolist() == [[n, i] for n, i in expected]
    for row, (number, index) in enumerate(expected):
        rest, drafted = answers[number].token_ids[index + 1 :], draft_of(number, index)
        lengths = [accepted_slowly(drafted, [0, 1, 0, 3, 4], rest), accepted_slowly(drafted[:2], [0, 1], rest)]
        assert tensors["lengths"][row].tolist() == lengths
        assert tensors["known"][row] == len(rest)
        assert tensors["forecasts"][row].tolist() == [records.NO_FORECAST, number + index / 64]
    records.claim(tmp_path, {"model": "a target"})
    records.write_shard(shard_path(tmp_path, 0), tensors, answers, FACTS)
    read = records.read_records(tmp_path)
    assert read.facts == FACTS and read.categories == ("chat", "code")
    assert [(t.number, t.category, t.end - t.start) for t in read.texts] == [
        (2, "chat", 1),
        (4, "chat", 8),
        (7, "code", 13),
    ]
    assert torch.equal(read.lengths, tensors["lengths"].long()) and torch.equal(read.entropy, tensors["entropy"])
    assert torch.equal(read.forecasts, tensors["forecasts"])
    ((shard, hidden),) = records.hidden_states(read.shards)
    assert (shard.start, shard.end) == (0, 22) and torch.equal(hidden, tensors["hidden"])


def test_records_near_the_end_are_marked_uncertain(tmp_path, answers):
    records.claim(tmp_path, {})
    tensors = assemble(made_up_steps(answers, 2), answers, FACTS)
    records.write_shard(shard_path(tmp_path, 0), tensors, answers, FACTS)
    read = records.read_records(tmp_path)
    # The deepest draft has 3 tokens: fewer known ones leave its length open, whether or not it reached the end.
    assert read.is_complete.tolist() == [known >= 3 for known in tensors["known"].tolist()]
    longest = 1 + torch.minimum(torch.tensor(FACTS.depths), read.known[:, None])
    assert (read.lengths <= longest).all()


def test_a_token_without_a_record_is_noticed(answers):
    steps = made_up_steps({7: answers[7]}, 3)
    shorter = {7: answers[7]._replace(token_ids=answers[7].token_ids * 3)}
    with pytest.raises(RuntimeError, match=r"recorded 16 of 41 tokens"):
        assemble(steps, shorter, FACTS)


def shard_of(folder: Path, number: int, answers: dict[int, Answer], facts: Facts = FACTS) -> Path:
    path = shard_path(folder, number)
    records.write_shard(path, assemble(made_up_steps(answers, number), answers, facts), answers, facts)
    return path


def test_what_is_no_folder_of_records_is_refused_in_a_sentence(tmp_path, answers):
    with pytest.raises(ValueError, match=r"--records .* holds no records.json; give a folder that"):
        records.read_records(tmp_path)
    records.claim(tmp_path, {"model": "b"})  # of a collection that never began: its engine refused the drafters, say
    with pytest.raises(ValueError, match="holds no finished shard yet"):
        records.read_records(tmp_path)
    records.claim(tmp_path, {"model": "a", "sampling": {"temperature": 0.0}})
    first = shard_of(tmp_path, 0, answers)
    records.claim(tmp_path, {"model": "a", "sampling": {"temperature": 0.0}})
    with pytest.raises(ValueError, match=r"another sampling.temperature \(0.0, here 0.5\); give another --out"):
        records.claim(tmp_path, {"model": "a", "sampling": {"temperature": 0.5}})
    other = shard_of(tmp_path, 1, answers, FACTS._replace(depths=(4, 2)))
    with pytest.raises(ValueError, match="of different models or trees"):
        records.read_records(tmp_path)
    other.write_bytes(first.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"shard-00001.safetensors is no whole shard of records"):
        records.read_records(tmp_path)
    (tmp_path / records.INDEX_FILE).write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        records.claim(tmp_path, {})


def test_some_of_the_drafters_can_be_chosen(tmp_path, answers):
    records.claim(tmp_path, {})
    shard_of(tmp_path, 0, answers)
    read = records.read_records(tmp_path)
    assert records.choose_drafters(read, ["chain", "tree"]).facts == FACTS
    for names, sentence in ((["tree"], "at least two"), (["tree", "eagle"], "'eagle' is none of the recorded")):
        with pytest.raises(ValueError, match=sentence):
            records.choose_drafters(read, names)


# -- real engines -------------------------------------------------------------------------------------------------

MAX_TOKENS = 32
COLLECT = (
    "--limit",
    "2",
    "--max-tokens",
    str(MAX_TOKENS),
    "--shard-prompts",
    "2",
    "--max-model-len",
    "512",
    "--batch-size",
    "4",
)


def descendants(pid: int) -> list[int]:
    """Processes that this one has started, and those that they have: the server of forks, and its forks."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
    return [each for child in map(int, found) for each in (child, *descendants(child))]


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory) -> Path:
    from engines import POCKET

    rows = [json.loads(line) for line in (POCKET / "prompts.jsonl").read_text().splitlines()]
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows if row["category"] in ("math", "code")))
    return file


@pytest.fixture(scope="module")
def spec_file(tmp_path_factory) -> Path:
    from engines import DFLASH, EAGLE3, K

    drafters = {
        "eagle3": {"model": str(EAGLE3), "num_speculative_tokens": K},
        "dflash": {"model": str(DFLASH), "num_speculative_tokens": K, "tree": {"num_nodes": 15}},
    }
    file = tmp_path_factory.mktemp("spec") / "spec.json"
    file.write_text(json.dumps({"method": "whiflash", "drafters": drafters}))
    return file


@pytest.fixture(scope="module")
def collected(tmp_path_factory, prompt_file, spec_file) -> Path:
    folder = tmp_path_factory.mktemp("records")
    crossspec("collect", "--out", folder, *COLLECT, "--prompts", prompt_file, "--spec", spec_file)
    return folder


@pytest.mark.e2e
def test_lengths_are_what_a_speculating_engine_accepts(collected, prompt_file):
    from engines import EAGLE3, chat, engine, ours
    from vllm import SamplingParams

    read = records.read_records(collected)
    assert read.facts.drafters == ("eagle3", "dflash") and read.facts.depths == (7, 7)
    prompts = [json.loads(line) for line in prompt_file.read_text().splitlines()]
    by_category = {c: [p["prompt"] for p in prompts if p["category"] == c][:2] for c in ("math", "code")}
    # Categories take turns, in the order of the file.
    texts = [p for row in zip(*(by_category[c] for c in read.categories), strict=True) for p in row]
    with engine(ours("eagle3", EAGLE3), enable_prefix_caching=False, per_request_spec_decode_metrics="summary") as llm:
        outputs = llm.generate(
            [chat(p) for p in texts], SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS), use_tqdm=False
        )
    for text, output in zip(read.texts, outputs, strict=True):
        assert text.end - text.start == len(output.outputs[0].token_ids) - 1
        places: list[int] = []
        walk(trajectories(read, [text]), always(0), lambda at, _, places=places: places.append(int(at[0])))
        rounds = (read.lengths[places, 0] - 1).tolist()
        left = list(output.outputs[0].spec_decode_metrics.histogram)
        # The engine counts the last round before the text is cut at its end.
        for accepted in rounds[:-1]:
            left[accepted] -= 1
        assert sorted(left)[0] == 0 and sum(left) == 1 and left.index(1) >= rounds[-1]


@pytest.mark.e2e
def test_lookups_say_what_they_expect_and_are_right_more_often_than_not(tmp_path):
    spec, prompts = tmp_path / "spec.json", tmp_path / "prompts.jsonl"
    drafters = {"suffix": {"tree": {"num_nodes": 8}}, "plain": {"type": "nothing"}}
    spec.write_text(json.dumps({"method": "whiflash", "drafters": drafters}))
    rows = [{"category": "echo", "prompt": "Say it again: " + f"{word} and so on, " * 8} for word in ("up", "down")]
    rows.append({"category": "no room", "prompt": "word " * 600})
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    crossspec("collect", "--out", str(tmp_path / "r"), *COLLECT, "--prompts", str(prompts), "--spec", str(spec))
    read = records.read_records(tmp_path / "r")
    assert [text.category for text in read.texts] == ["echo", "echo"], "what is longer than the model takes is left out"
    suffix, plain = (read.forecasts[:, read.facts.drafters.index(name)] for name in ("suffix", "plain"))
    accepted = read.lengths[:, read.facts.drafters.index("suffix")] - 1
    assert (plain == 0).all() and (suffix >= 0).all() and (accepted[suffix == 0] == 0).all()
    assert accepted[suffix > 1].float().mean() > accepted[suffix <= 1].float().mean()


@pytest.mark.e2e
@pytest.mark.slow
def test_a_killed_collection_goes_on_to_the_same_records(collected, tmp_path, prompt_file, spec_file):
    command = ["collect", "--out", str(tmp_path), *COLLECT, "--prompts", str(prompt_file), "--spec", str(spec_file)]
    process = subprocess.Popen([sys.executable, "-m", "vllm_crossspec.cli.app", *command])
    deadline = time.monotonic() + 600
    while not shard_path(tmp_path, 0).is_file():
        assert process.poll() is None and time.monotonic() < deadline
        started = descendants(process.pid)  # now: a shard takes less than a second
    process.kill()
    process.wait()
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not shard_path(tmp_path, 1).is_file()
    first = shard_path(tmp_path, 0)
    stamp = first.stat().st_mtime_ns
    crossspec(*command)
    assert first.stat().st_mtime_ns == stamp, "a finished shard was made again"
    for number in range(2):
        whole, resumed = (content_of(shard_path(folder, number)) for folder in (collected, tmp_path))
        assert whole[0] == resumed[0] and whole[1].keys() == resumed[1].keys()
        assert all(torch.equal(tensor, resumed[1][name]) for name, tensor in whole[1].items())


def content_of(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Metadata and tensors; the order in which the file has them is no part of it."""
    with safe_open(path, "pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


PLAYED_ENGINE = """
import json, os, sys
from pathlib import Path
job, events = json.load(open(sys.argv[1])), os.fdopen(int(sys.argv[2]), "w", buffering=1)
def emit(event, **fields):
    events.write(json.dumps({"event": event, **fields}) + "\\n")
out = Path(job["out"])
with (out / "asked").open("a") as asked:
    asked.write(json.dumps([shard["number"] for shard in job["shards"]]) + "\\n")
if job["model"].endswith("bad"):
    emit("error", message="router.policy: no such target")
    sys.exit(1)
emit("ready")
for order in map(json.loads, open(job["orders"])):
    shard = job["shards"][order["shard"]]
    if order["shard"] == 2:
        print("ZeroDivisionError: the third shard")
        sys.exit(3)
    (out / f"shard-{shard['number']:05d}.safetensors").write_text(json.dumps(shard))
    emit("progress", num_tokens=3)
    emit("shard", number=shard["number"], num_made=2)
    emit("done")
"""


@pytest.mark.slow
def test_only_missing_shards_are_asked_for_again(tmp_path, capsys, monkeypatch):
    """The engine's process is played by a script that dies at the third shard."""
    (tmp_path / "played_collection.py").write_text(PLAYED_ENGINE)
    monkeypatch.setattr(
        "crossspec_tools.records.cli_collect.COLLECT", collect.COLLECT._replace(module="played_collection")
    )
    shown: list[Path] = []
    monkeypatch.setattr("crossspec_tools.records.cli_router.show_oracles", lambda records, costs: shown.append(records))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    rows = [{"category": "a", "turns": ["1", "2"]}, {"category": "a", "prompt": "3"}, {"category": "b", "prompt": "4"}]
    compressed = gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
    (tmp_path / "rows.jsonl.gz").write_bytes(compressed)
    out = tmp_path / "out"
    options = ["--prompts", str(tmp_path / "rows.jsonl.gz"), "--shard-prompts", "1"]

    def run(folder: Path, *more: str) -> int | str | None:
        monkeypatch.setattr(sys, "argv", ["crossspec", "collect", "--out", str(folder), *options, *more])
        with pytest.raises(SystemExit) as end:
            app.main()
        return end.value.code

    assert run(out) == app.USAGE_ERROR
    assert "ended with status 3: ZeroDivisionError: the third shard" in capsys.readouterr().err
    assert not shown and run(out) == run(out) == 0 and shown == [out, out]
    assert [json.loads(line) for line in (out / "asked").read_text().splitlines()] == [[0, 1, 2], [2]]
    # Categories take turns, and a prompt of two turns makes two texts.
    shards = [json.loads(shard_path(out, i).read_text())["prompts"] for i in range(3)]
    assert [[(p["text"], p["turns"]) for p in shard] for shard in shards] == [
        [(0, ["1", "2"])], [(2, ["4"])], [(3, ["3"])],
    ]  # fmt: skip
    (target := tmp_path / "bad").mkdir()
    (target / "config.json").write_text("{}")
    assert run(tmp_path / "refused", "--model", str(target)) == app.USAGE_ERROR
    assert capsys.readouterr().err.endswith("crossspec: collect: router.policy: no such target\n")


def test_prompts_that_drafters_learned_from_are_left_out(tmp_path, capsys):
    """By the token ids that `train generate` wrote, or as text; the limit counts what is left."""
    from engines import POCKET
    from transformers import AutoTokenizer

    from crossspec_tools.records.cli_collect import interleaved
    from crossspec_tools.records.learned import learned_prompts
    from crossspec_tools.train.data import chat_prompt
    from crossspec_tools.train.generations import Generation, write_shard

    prompts = tmp_path / "prompts.jsonl"
    asked = ["Say what a tree is.", "  Ünï: <|im_end|> and\n  lines ", "What is 3 + 4?", "And 5 + 6?", "Last one."]
    prompts.write_text("".join(json.dumps({"category": "a", "prompt": text}) + "\n" for text in asked))
    tokenizer = AutoTokenizer.from_pretrained(str(POCKET / "target"))
    learned = tokenizer([chat_prompt(text.strip()) for text in asked[:2]], add_special_tokens=False)["input_ids"]
    (tmp_path / "responses").mkdir()
    write_shard(
        tmp_path / "responses" / "train-00000.jsonl.gz", [Generation(ids, [5, 6], "a", True) for ids in learned]
    )
    (tmp_path / "more.jsonl").write_text(json.dumps({"prompt": asked[2] + "\n"}) + "\n")

    def left(*sources, limit=None):
        is_known = learned_prompts([tmp_path / source for source in sources], str(POCKET / "target"))
        return [prompt.turns[0] for prompt in interleaved([prompts], limit, is_known)]

    assert left("responses", "more.jsonl") == asked[3:]
    assert "3 of 5 prompts left out: drafters learned from these" in capsys.readouterr().out
    assert left("responses", limit=2) == asked[2:4]
    assert left("more.jsonl") == [*asked[:2], *asked[3:]]
    with pytest.raises(ValueError, match="learned from every one"):
        left("prompts.jsonl")
    with pytest.raises(ValueError, match=r"--learned-from .*none: give a folder of responses or a file of prompts"):
        left("none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="--learned-from .*empty: no train-"):
        left("empty")


def test_collect_refuses_what_cannot_be_recorded(tmp_path, capsys, monkeypatch):
    single = tmp_path / "single.json"
    single.write_text(json.dumps({"method": "eagle3", "model": "x", "tree": {"type": "chain"}}))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n')
    records.claim(tmp_path / "other", {"model": "another"})
    (tmp_path / "other" / "shard-00000.safetensors").touch()
    for options, sentence in (
        (["--spec", str(single)], "at least two drafters"),
        (["--spec", str(tmp_path / "none.json")], "No such file"),
        (["--prompts", str(tmp_path / "none.jsonl")], "No such file"),
        (["--prompts", str(rows), "--out", str(tmp_path / "other")], "holds records with another"),
    ):
        arguments = ["collect", "--out", str(tmp_path / "records"), *options]
        monkeypatch.setattr(sys, "argv", ["crossspec", *arguments])
        with pytest.raises(SystemExit) as end:
            app.main()
        shown = capsys.readouterr().err
        assert end.value.code == app.USAGE_ERROR and sentence in shown and shown.count("\n") == 1
