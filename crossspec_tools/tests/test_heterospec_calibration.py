"""HeteroSpec's calibration: the file and its refusals, the regression tree, the records, the command."""

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import crossspec
from engines import EAGLE3, POCKET, TARGET
from safetensors.torch import load_file, save, save_file

from crossspec_tools.records import cart, cli_calibrate, rounds
from crossspec_tools.records.shards import shard_path
from crossspec_tools.train.records import Answer
from vllm_crossspec.config.parse import parse
from vllm_crossspec.heterospec.calibration import (
    BinFacts,
    Calibration,
    TreeShape,
    check_calibration,
    read_calibration,
    write_calibration,
)
from vllm_crossspec.heterospec.heterospec import Reading
from vllm_crossspec.kinds.identity import Identity, identify
from vllm_crossspec.kinds.tree import tree_kind

KEY = "speculative_config.adaptive.model"
TREE = TreeShape(8, 10, 60)
SHARPNESS = tree_kind("dynamic", "tree.type").defaults["sharpness"]
ONE, OTHER = Identity("target", "aa", "bb"), Identity("eagle3", "cc", "dd")
EIGHT = Calibration(
    thresholds=(0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0),
    bins=tuple(BinFacts(8.0 + i, 10, 100, 8.0 - i) for i in range(8)),
    gammas=(0.3, 0.6, 1.0),
    alpha=4,
    tree=TREE,
    target=ONE,
    drafter=OTHER,
    made={"command": "crossspec calibrate heterospec"},
)


# -- the file -------------------------------------------------------------------------------------------------


def test_a_file_is_read_as_it_was_written_and_written_as_it_was_read(tmp_path):
    write_calibration(tmp_path / "a.json", EIGHT)
    read = read_calibration(tmp_path / "a.json", KEY)
    assert read == EIGHT
    write_calibration(tmp_path / "b.json", read)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_the_policy_is_the_papers():
    """Section 4.3 with depth 8 and 60 nodes: alpha 4, and 0.3, 0.6 and 1 of the nodes and alpha - i more."""
    policy = EIGHT.policy()
    assert policy.thresholds == EIGHT.thresholds
    assert policy.extensions == (4, 3, 2, 0, 0, 0, 0, 0)
    assert policy.widths == (18 + 4, 36 + 3, 60, 60, 60, 60, 60, 60)
    assert EIGHT.policy(max_extension=0).extensions == (0,) * 8


def test_another_reading_is_in_the_file_and_ours_is_not(tmp_path):
    write_calibration(tmp_path / "ours.json", EIGHT)
    assert "reading" not in json.loads((tmp_path / "ours.json").read_text())
    papers = replace(EIGHT, reading=Reading(first_bin=1, is_capped=False))
    write_calibration(tmp_path / "papers.json", papers)
    content = json.loads((tmp_path / "papers.json").read_text())
    assert content["reading"] == {"first_bin": 1, "is_capped": False}
    assert [entry["width"] for entry in content["bins"]][:4] == [21, 38, 61, 60]
    assert read_calibration(tmp_path / "papers.json", KEY) == papers
    for wrong, sentence in (({"first_bin": 2}, "first_bin 0 or 1"), ({"last": 1}, "another kind than expected")):
        (tmp_path / "wrong.json").write_text(json.dumps(content | {"reading": wrong}))
        with pytest.raises(ValueError, match=rf"{KEY}: .*{sentence}"):
            read_calibration(tmp_path / "wrong.json", KEY)


DAMAGES = {
    "not JSON": (lambda text: text[:-9], "is not valid JSON"),
    "a list": (lambda text: "[]", "has format_version None"),
    "another version": (lambda text: text.replace('"format_version": 1', '"format_version": 7'), "format_version 7"),
    "no alpha": (lambda text: text.replace('"alpha"', '"beta"'), "has no 'alpha'"),
    "a word": (lambda text: text.replace('"alpha": 4', '"alpha": "four"'), "another kind than expected"),
    "falling thresholds": (lambda text: text.replace("0.25,", "0.05,", 1), "thresholds must rise"),
    "equal thresholds": (lambda text: text.replace("0.25,", "0.1,", 1), "thresholds must rise"),
    "endless thresholds": (lambda text: text.replace("8.0\n  ],", "Infinity\n  ],", 1), "at most 7 numbers"),
    "a bin too few": (lambda text: text.replace("0.1,", "", 1), "bins must be 7"),
    "too much of the nodes": (lambda text: text.replace("0.3,", "1.3,", 1), "gammas must be fewer"),
    "no levels": (lambda text: text.replace('"depth": 8', '"depth": 0'), "tree's sizes 1 or more"),
}


@pytest.mark.parametrize("damage, sentence", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_one_sentence(tmp_path, damage, sentence):
    file = tmp_path / "calibration.json"
    write_calibration(file, EIGHT)
    text = file.read_text()
    assert damage(text) != text
    file.write_text(damage(text))
    with pytest.raises(ValueError) as problem:
        read_calibration(file, KEY)
    assert str(problem.value).startswith(f"{KEY}: ") and sentence in str(problem.value)
    assert "crossspec calibrate heterospec" in str(problem.value)


@pytest.mark.parametrize("name", ["nothing.json", "."])
def test_a_missing_file_is_one_sentence(tmp_path, name):
    with pytest.raises(ValueError, match=rf"{KEY}: there is no file .*crossspec calibrate heterospec"):
        read_calibration(tmp_path / name, KEY)


def test_other_models_and_other_trees_are_refused():
    def check(**changed):
        wanted = {"target": ONE, "drafter": OTHER, "tree": TREE} | changed
        check_calibration(EIGHT, key=KEY, **wanted)

    check()
    check(target=ONE._replace(name="renamed"))
    check(target=None, drafter=OTHER._replace(weights=None))  # what is not known cannot be held against it
    for changed, what in (
        ({"target": ONE._replace(config="ee")}, "another target"),
        ({"target": ONE._replace(weights="ee")}, "another target"),
        ({"drafter": ONE}, "another drafter"),
        ({"tree": TREE._replace(depth=7)}, "of depth 8, top_k 10, num_nodes 60, sharpness 1, and these are of depth 7"),
        ({"tree": TREE._replace(sharpness=2.0)}, "num_nodes 60, sharpness 1, and these are of .* sharpness 2"),
        ({"tree": TREE._replace(num_nodes=59)}, "num_nodes 59"),
    ):
        with pytest.raises(ValueError, match=rf"{KEY}: .*{what}.*crossspec calibrate heterospec"):
            check(**changed)


def test_a_model_is_known_wherever_it_lies(tmp_path):
    here = identify(str(EAGLE3), KEY)
    shutil.copytree(EAGLE3, tmp_path / "copy")
    (tmp_path / "link").symlink_to(tmp_path / "copy")
    copied = identify(str(tmp_path / "copy"), KEY)
    assert copied.is_same(here) and identify(str(tmp_path / "link"), KEY).is_same(here)
    assert copied.name == "copy" and str(tmp_path) not in json.dumps(copied)
    config = tmp_path / "copy" / "config.json"
    said = json.loads(config.read_text())
    config.write_text(json.dumps(dict(reversed((said | {"transformers_version": "9"}).items())), indent=7))
    assert identify(str(tmp_path / "copy"), KEY).is_same(here)
    config.write_text(json.dumps(said | {"rope_theta": 7.0}))
    assert not identify(str(tmp_path / "copy"), KEY).is_same(here)
    config.write_text(json.dumps(said))
    weights = tmp_path / "copy" / "model.safetensors"
    tensors = load_file(weights)
    name = max(tensors, key=lambda name: tensors[name].numel())
    tensors[name] = (tensors[name].float() * 1.01).to(tensors[name].dtype)  # trained on, with the same shapes
    save_file(tensors, weights)
    assert not identify(str(tmp_path / "copy"), KEY).is_same(here)
    weights.unlink()
    assert identify(str(tmp_path / "copy"), KEY).weights is None


# -- the regression tree --------------------------------------------------------------------------------------


def best_split(phi, rank, leaf):
    """The cut that leaves the least squared error, by trying all of them; None where none helps."""
    order = np.argsort(phi, kind="stable")
    phi, rank = phi[order], rank[order]
    best, error = None, ((rank - rank.mean()) ** 2).sum()
    for i in range(leaf, len(phi) - leaf + 1):
        if i in (0, len(phi)) or phi[i - 1] == phi[i]:
            continue
        left, right = rank[:i], rank[i:]
        left_over = ((left - left.mean()) ** 2).sum() + ((right - right.mean()) ** 2).sum()
        if left_over < error - 1e-9:
            best, error = (phi[i - 1] + phi[i]) / 2, left_over
    return best


def cuts(phi, rank, leaf, levels):
    at = best_split(phi, rank, leaf) if levels and len(phi) >= 2 * leaf else None
    if at is None:
        return []
    left = phi <= at
    return [*cuts(phi[left], rank[left], leaf, levels - 1), at, *cuts(phi[~left], rank[~left], leaf, levels - 1)]


@pytest.mark.parametrize("seed, count", [(0, 60), (1, 400), (2, 1500)])
def test_thresholds_are_the_greedy_ones(seed, count):
    generator = np.random.default_rng(seed)
    phi = generator.gamma(2.0, 1.0, count).astype(np.float32)
    rank = 8 + np.floor(phi * 4 + generator.exponential(3.0, count))
    found = cart.fit_thresholds(phi, rank)
    expected = cuts(phi.astype(np.float64), rank, max(10, math.ceil(0.05 * count)), 3)
    assert 2 <= len(found) <= 7 and list(found) == sorted(set(found))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert cart.fit_thresholds(phi[::-1], rank[::-1]) == found, "the order of the rounds decides"


def test_a_bin_may_hold_one_path():
    """Three outliers below all others, whose rank is not theirs: a cut for them, or none of 5 %."""
    phi = np.arange(200, dtype=np.float32)
    rank = np.where(phi < 3, 40, 10 + (phi > 100))
    assert cart.fit_thresholds(phi, rank, leaf_share=0.0)[0] == 2.5
    assert cart.fit_thresholds(phi, rank)[0] >= 9.5
    assert len(cart.fit_thresholds(phi, phi, leaf_share=0.0, levels=5)) == 31


def test_steps_are_found_where_they_are():
    phi = np.linspace(0, 8, 801, dtype=np.float32)
    rank = 10 * np.floor(phi)
    found = cart.fit_thresholds(phi, rank)
    assert len(found) == 7
    np.testing.assert_allclose(found, np.arange(1, 8) - 0.005, atol=1e-5)


def test_ranks_that_do_not_differ_give_no_bins():
    assert cart.fit_thresholds(np.linspace(0, 8, 100, dtype=np.float32), np.full(100, 9)) == ()


@pytest.mark.parametrize("bins, low", [(8, 3), (7, 3), (6, 3), (5, 2), (4, 2), (3, 1), (2, 1), (1, 0)])
def test_low_bins_are_never_most_of_them(bins, low):
    assert cart.low_bins(bins) == low


# -- records --------------------------------------------------------------------------------------------------


def made_rounds(count=400, seed=0, depth=8, full_share=0.4):
    """Rounds whose surer trees are accepted further, at better ranks."""
    generator = torch.Generator().manual_seed(seed)
    phi = torch.rand(count, generator=generator) * 10
    accepted = ((1 - phi / 12) * (depth + 3) * torch.rand(count, generator=generator).sqrt()).long().clamp(max=depth)
    accepted[: int(count * full_share)] = depth
    steps = 1 + (phi[:, None] * torch.rand(count, depth, generator=generator) / 2).long()
    path = steps.cumsum(dim=1).clamp(max=60).masked_fill(torch.arange(depth) >= accepted[:, None], 0)
    return rounds.Rounds(
        phi,
        path.to(torch.uint8),
        torch.full((count,), depth, dtype=torch.int16),
        torch.full((count,), 60, dtype=torch.int16),
        torch.arange(count, dtype=torch.int32) // 10,
        dict.fromkeys(range(-(-count // 10)), "chat"),
        rounds.RoundsFacts(ONE, OTHER, TreeShape(depth, 10, 60)),
    )


def shard_of(data, folder, number=0, facts=None):
    answers = {n: Answer(c, 5, [0] * 99, "stop") for n, c in data.categories.items()}
    folder.mkdir(exist_ok=True)
    (folder / rounds.INDEX_FILE).write_text(
        json.dumps(
            {
                "command": "c",
                "sampling": {"temperature": 0.0},
                "seed": 0,
                "prompts": "p",
                "speculative_config": SPEC
                | {"tree": SPEC["tree"] | {"by_batch_size": {"1": 24}}, "adaptive": {"type": "record"}},
            }
        )
    )
    tensors = {name: getattr(data, name) for name in rounds.NAMES}
    rounds.write_shard(shard_path(folder, number), tensors, answers, facts or data.facts)


def step(ids, phi, paths, num_sampled, parents, size):
    tensors = {
        "phi": torch.tensor(phi),
        "path": torch.tensor(paths, dtype=torch.int32),
        "num_sampled": torch.tensor(num_sampled, dtype=torch.int32),
        "parents": torch.tensor(parents, dtype=torch.uint8),
        "size": torch.tensor(size, dtype=torch.int32),
    }
    return ids, save(tensors)


def test_what_an_engine_records_becomes_rounds_of_texts():
    chain, bush = [0, 1, 2, 3], [0, 0, 1, 2]  # row of the parent of rows 1 to 4
    steps = [
        step(["1-a", "0-b"], [0.5, 0.25], [[0, 1, 2], [0, 2, 7]], [3, 2], [chain, bush], [4, 3]),
        step(["0-b", "1-a"], [1.5, 2.5], [[0, 9, 9], [0, 1, 3]], [1, 3], [bush, bush], [4, 2]),
        step(["1-a"], [3.5], [[0, 1, 2]], [3], [chain], [4]),
    ]
    # Text 0 is its prompt's token, two and one more; text 1 ends within its third round.
    answers = {0: Answer("math", 5, [0] * 4, "stop"), 1: Answer("code", 5, [0] * 8, "stop")}
    made = rounds.assemble(steps, answers, depth=2)
    assert made["text"].tolist() == [0, 0, 1, 1]
    assert made["phi"].tolist() == [0.25, 1.5, 0.5, 2.5]
    assert made["path"].tolist() == [[2, 0], [0, 0], [1, 2], [1, 3]]
    assert made["depth"].tolist() == [2, 2, 4, 1] and made["size"].tolist() == [3, 4, 4, 2]


def test_rounds_say_what_fewer_nodes_had_accepted():
    data = made_rounds()
    widths = torch.arange(len(data.phi)) % 61
    expected = [
        sum(0 < row <= width for row in path) for path, width in zip(data.path.tolist(), widths.tolist(), strict=True)
    ]
    assert data.accepted_within(widths).tolist() == expected
    assert data.rank.tolist() == [max(path) for path in data.path.tolist()]
    assert data.accepted.tolist() == [sum(row > 0 for row in path) for path in data.path.tolist()]


def test_shards_come_back_and_foreign_ones_are_refused(tmp_path):
    data, more = made_rounds(), made_rounds(seed=1)
    shard_of(data, tmp_path / "a")
    shard_of(more, tmp_path / "a", 1)
    read = rounds.read_rounds(tmp_path / "a")
    assert torch.equal(read.path, torch.cat([data.path, more.path])) and read.facts == data.facts
    shard_of(more, tmp_path / "a", 2, data.facts._replace(target=OTHER))
    with pytest.raises(ValueError, match="of different models or trees"):
        rounds.read_rounds(tmp_path / "a")
    shard_path(tmp_path / "a", 2).write_bytes(b"cut")
    with pytest.raises(ValueError, match="is no whole shard of rounds"):
        rounds.read_rounds(tmp_path / "a")
    (tmp_path / "b").mkdir()
    with pytest.raises(ValueError, match=r"--records .* holds no rounds.json"):
        rounds.read_rounds(tmp_path / "b")
    (tmp_path / "b" / rounds.INDEX_FILE).write_text("{}")
    with pytest.raises(ValueError, match="holds no finished shard"):
        rounds.read_rounds(tmp_path / "b")


def test_a_calibration_is_made_of_fully_accepted_paths_alone():
    data = made_rounds()
    found = cart.calibrate(data, command="c")
    full = (data.accepted == 8).numpy()
    assert found.thresholds == cart.fit_thresholds(data.phi.numpy()[full], data.rank.numpy()[full])
    assert sum(one.num_paths for one in found.bins) == full.sum() == found.made["fully_accepted"]
    assert sum(one.num_rounds for one in found.bins) == 400 == found.made["rounds"]
    assert found.alpha == 4 and found.gammas == (0.3, 0.6, 1.0)[: len(found.bins) // 2]
    # A round that nobody measured counts for nothing.
    phi = data.phi.clone()
    phi[7] = math.nan
    left = cart.calibrate(data._replace(phi=phi))
    assert left.made["rounds"] == 399 and left.made["fully_accepted"] == full.sum() - full[7]
    policy = found.policy()
    assert cart.bins_of(data.phi, found.thresholds).tolist() == [policy.bin_of(p) for p in data.phi.tolist()]
    rows = cart.report(data, found)
    assert sum(row.num_rounds for row in rows) == 400 and rows[0].mean_within <= rows[0].mean_accepted


def test_too_few_paths_are_one_sentence():
    data = made_rounds()
    data = data._replace(path=data.path.clone().index_fill_(1, torch.tensor([7]), 0))
    with pytest.raises(ValueError, match="0 of 400 rounds accepted a path down to level 8.*more prompts"):
        cart.calibrate(data)
    flat = torch.arange(1, 9, dtype=torch.uint8).expand(400, 8)
    with pytest.raises(ValueError, match="do not differ with Phi.*more prompts"):
        cart.calibrate(data._replace(path=flat))


# -- the command ----------------------------------------------------------------------------------------------


def calibrated(out, *options):
    return crossspec("calibrate", "heterospec", "--out", out, *options)


def test_the_same_records_give_the_same_file(tmp_path):
    shard_of(made_rounds(), tmp_path / "records")
    said = calibrated(tmp_path / "a.json", "--records", tmp_path / "records", "--picture")
    printed = json.loads(said.strip().splitlines()[-1])
    assert printed == SPEC | {"adaptive": str(tmp_path / "a.json")}
    assert parse(printed, ()).drafters["eagle3"].adaptive.model == printed["adaptive"]
    assert "fully" in said and "added" in said and (tmp_path / "a.png").stat().st_size > 1000
    calibrated(tmp_path / "b.json", "--records", tmp_path / "records")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    read = read_calibration(tmp_path / "a.json", KEY)
    assert read.made["command"] == "c" and read.target == ONE and read.tree == TREE
    assert "leaf_share" not in read.made
    papers = ("--first-bin", "1", "--no-cap", "--leaf-share", "0", "--alpha", "5")
    calibrated(tmp_path / "c.json", "--records", tmp_path / "records", *papers)
    other = read_calibration(tmp_path / "c.json", KEY)
    expected = cart.calibrate(made_rounds(), 5, reading=Reading(1, False), leaf_share=0.0)
    assert replace(other, made={}) == replace(expected, made={}) and other.thresholds != read.thresholds
    assert other.made["leaf_share"] == 0.0 and other.policy().extensions[:2] == (4, 3)


def test_the_command_in_the_file_names_no_folder_of_a_machine():
    spec = json.dumps(SPEC | {"model": str(EAGLE3)})
    answers = SimpleNamespace(model=str(TARGET), limit=None, prompts=[EAGLE3 / "config.json"])
    command = cli_calibrate._command(answers, spec, {"temperature": 0.0})
    assert "/" not in command and '"model": "eagle3"' in command and "--model target" in command


TOO_MANY = {"method": "eagle3", "model": str(POCKET / "eagle3"), "tree": {"num_nodes": 255}}
BAD = {
    "no folder": (["--out", "no/where.json"], "--out no/where.json: name a file in a folder that exists"),
    "no records": (["--out", "a.json", "--records", "none"], "--records none holds no rounds.json"),
    "a chain": (["--out", "a.json", "--spec", '{"method": "eagle3", "model": "x"}'], "a dynamic tree"),
    "a searched tree": (
        ["--out", "a.json", "--spec", '{"method": "dart", "model": "x", "tree": {"type": "continuity"}}'],
        "a dynamic tree",
    ),
    "no JSON": (["--out", "a.json", "--spec", "{"], "is not JSON"),
    "adaptive already": (
        ["--out", "a.json", "--spec", '{"method": "eagle3", "model": "x", "tree": {}, "adaptive": "y"}'],
        "leave it out",
    ),
    "a schedule": (
        ["--out", "a.json", "--spec", '{"method": "eagle3", "model": "x", "tree": {"by_batch_size": {"1": 3}}}'],
        "whole trees are needed",
    ),
    "more nodes than a tree can have": (
        ["--out", "a.json", "--no-cap", "--spec", json.dumps(TOO_MANY)],
        "would be given 257, and a request has at most 255",
    ),
    "a picture over the file": (["--out", "a.png", "--picture"], "the picture would have this name"),
}


@pytest.mark.parametrize("arguments, sentence", BAD.values(), ids=BAD)
def test_mistakes_are_one_sentence(monkeypatch, capsys, tmp_path, arguments, sentence):
    from vllm_crossspec.cli import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["crossspec", "calibrate", "heterospec", *arguments])
    with pytest.raises(SystemExit) as end:
        app.main()
    said = capsys.readouterr().err
    assert end.value.code == 2 and sentence in said and said.count("\n") == 1


def test_the_routers_thresholds_are_still_found_without_a_word_more(monkeypatch, capsys):
    from vllm_crossspec.cli import app

    for words in (["calibrate"], ["calibrate", "router"]):
        monkeypatch.setattr(sys, "argv", ["crossspec", *words, "--records", "nowhere"])
        with pytest.raises(SystemExit):
            app.main()
        assert "nowhere holds no records.json" in capsys.readouterr().err


# -- engines --------------------------------------------------------------------------------------------------

SPEC = {"method": "eagle3", "model": str(EAGLE3), "tree": {"depth": 4, "top_k": 6, "num_nodes": 24}}
COLLECT = ("--limit", "3", "--max-tokens", "32", "--shard-prompts", "6", "--max-model-len", "512")


@pytest.fixture(scope="module")
def collected(tmp_path_factory) -> Path:
    """A calibration of the pocket models with a small tree; its records beside it."""
    folder = tmp_path_factory.mktemp("calibration")
    (folder / "spec.json").write_text(json.dumps(SPEC))
    calibrated(folder / "a.json", "--spec", folder / "spec.json", *COLLECT, "--batch-size", "6")
    return folder


@pytest.mark.e2e
def test_what_is_recorded_is_what_was_accepted(collected):
    """The same prompts without recording: vLLM's own counts of every text, and the same tokens."""
    from engines import chat, engine
    from vllm import SamplingParams

    read = rounds.read_rounds(collected / "a.json.rounds")
    assert read.facts.tree == TreeShape(4, 6, 24, SHARPNESS)
    assert read.facts.target.is_same(identify(str(TARGET), KEY))
    assert read.phi.isfinite().all() and (read.phi >= 0).all() and (read.phi <= 4 * math.log(6) + 1e-4).all()
    assert (read.depth <= 4).all() and (read.size == 24).all()
    rows = [json.loads(line) for line in (POCKET / "prompts.jsonl").read_text().splitlines()]
    groups = [[r["prompt"] for r in rows if r["category"] == c][:3] for c in dict.fromkeys(r["category"] for r in rows)]
    texts = [prompt for turn in zip(*groups, strict=True) for prompt in turn]
    with engine(SPEC, enable_prefix_caching=False, per_request_spec_decode_metrics="summary") as llm:
        outputs = llm.generate([chat(p) for p in texts], SamplingParams(temperature=0.0, max_tokens=32), use_tqdm=False)
    for number, output in enumerate(outputs):
        mine = read.accepted[read.text == number].tolist()
        left = list(output.outputs[0].spec_decode_metrics.histogram)
        for accepted in mine:
            left[accepted] -= 1
        # The last round is not recorded where it reaches past the end of the text.
        assert min(left) == 0 and sum(left) <= 1
        num_tokens = len(output.outputs[0].token_ids)
        assert num_tokens - 5 <= 1 + sum(mine) + len(mine) <= num_tokens


@pytest.mark.e2e
@pytest.mark.slow
def test_a_second_collection_gives_the_same_bins(collected, tmp_path):
    calibrated(tmp_path / "a.json", "--spec", collected / "spec.json", *COLLECT, "--batch-size", "6")
    first, second = (rounds.read_rounds(folder / "a.json.rounds") for folder in (collected, tmp_path))
    assert all(torch.equal(getattr(first, name), getattr(second, name)) for name in rounds.NAMES)
    assert (tmp_path / "a.json").read_bytes() == (collected / "a.json").read_bytes()


@pytest.mark.e2e
def test_a_finished_collection_needs_no_engine(collected, tmp_path):
    shutil.copytree(collected, tmp_path / "again")
    (tmp_path / "again" / "a.json").unlink()
    options = ("--spec", tmp_path / "again" / "spec.json", *COLLECT, "--batch-size", "6")
    calibrated(tmp_path / "again" / "a.json", *options)
    assert (tmp_path / "again" / "a.json").read_bytes() == (collected / "a.json").read_bytes()
    with pytest.raises(AssertionError, match=r"status 2:[\s\S]*another --max-tokens \(32, here 31\)"):
        calibrated(tmp_path / "again" / "a.json", *options, "--max-tokens", "31")


@pytest.mark.e2e
def test_the_engine_refuses_a_calibration_of_something_else(collected, tmp_path):
    from vllm import EngineArgs

    def build(file, **changed):
        spec = SPEC | {"adaptive": str(file)} | changed
        EngineArgs(
            str(TARGET), dtype="float32", max_model_len=512, enforce_eager=True, speculative_config=spec
        ).create_engine_config()

    made = read_calibration(collected / "a.json", KEY)
    build(collected / "a.json")
    wrong = {
        "another target": replace(made, target=made.drafter),
        "another drafter": replace(made, drafter=made.target),
        "made for trees of depth 5": replace(made, tree=made.tree._replace(depth=5)),
    }
    for sentence, calibration in wrong.items():
        write_calibration(tmp_path / "wrong.json", calibration)
        with pytest.raises(ValueError, match=rf"{KEY}: .*{sentence}.*crossspec calibrate heterospec"):
            build(tmp_path / "wrong.json")
    with pytest.raises(ValueError, match=rf"{KEY}: there is no file"):
        build(tmp_path / "none.json")
    with pytest.raises(ValueError, match="adaptive.model is missing"):
        build("", adaptive={"type": "heterospec"})


def test_the_shipped_calibration_is_of_the_shipped_models_and_the_demos_tree():
    from vllm_crossspec.cli.demo import METHODS

    tree = METHODS["eagle3-tree"]["tree"]
    shipped = read_calibration(POCKET / "heterospec" / "calibration.json", KEY)
    check_calibration(
        shipped,
        target=identify(str(TARGET), KEY),
        drafter=identify(str(EAGLE3), KEY),
        tree=TreeShape(tree["depth"], tree["top_k"], tree["num_nodes"], SHARPNESS),
        key=KEY,
    )
    assert len(shipped.bins) >= 4 and shipped.policy().widths[0] < tree["num_nodes"]
    assert "/" not in shipped.made["command"], "a path of somebody's machine"
