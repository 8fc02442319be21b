"""research/heterospec_offline.py and HeteroSpec's tables: what records say against trees that are grown."""

import json
from pathlib import Path

import heterospec_offline
import numpy as np
import pytest
import torch
from confu_offline import Group, Round, Size, load_control
from engines import EAGLE3, POCKET, TARGET
from made_tables import make_table, refusal
from papers import heterospec as tables
from safetensors.torch import load_file
from texts import open_target

from crossspec_tools.records.shards import shard_path, write_shard
from crossspec_tools.train.generations import Generation
from crossspec_tools.train.generations import write_shard as write_responses
from vllm_crossspec.config.schema import AdaptivePolicy
from vllm_crossspec.heterospec.calibration import TreeShape
from vllm_crossspec.kinds.identity import Identity

SHARPNESS = 1.5


def texts():
    """Prompts of the demo as if their second halves were answers: there, too, the drafter is right now and then."""
    from transformers import AutoTokenizer

    tokenizer, rows = AutoTokenizer.from_pretrained(TARGET), []
    for line in (POCKET / "prompts.jsonl").read_text().splitlines():
        prompt = json.loads(line)
        ids = tokenizer.encode(prompt["prompt"])[:40]
        rows.append(Generation(ids[: len(ids) // 2], ids[len(ids) // 2 :], prompt["category"], True))
    rows = [row for row in rows if len(row.response_ids) > 14][:4]
    return sorted(rows, key=lambda row: len(row.prompt_ids) + len(row.response_ids))


@pytest.fixture(scope="module")
def drafts():
    target = open_target(TARGET)
    model = load_control(EAGLE3, target)
    with torch.no_grad():
        model.lm_head.weight.mul_(SHARPNESS)
    return model, target


def records_of(tensors, counts, categories, tree, levels):
    facts = heterospec_offline.Facts(Identity("t", "a", "b"), Identity("d", "a", "b"), tree, levels, False)
    arrays = {name: tensors[name].numpy() for name in heterospec_offline.NAMES}
    return heterospec_offline.Records(**arrays, counts=np.array(counts), categories=categories, facts=facts)


@torch.no_grad()
def test_every_smaller_tree_is_read_off(drafts):
    model, target = drafts
    rows, tree, levels, top_k = texts(), TreeShape(3, 4, 12, SHARPNESS), 5, 4
    records = records_of(
        heterospec_offline.record(model, target, rows, tree, levels),
        [len(row.response_ids) - 1 for row in rows],
        [row.category for row in rows],
        tree,
        levels,
    )
    group, seen = Group(model, target, rows, futures=False), 0
    for text, row in enumerate(rows):
        # Places whose trees do not reach past the text's end, which is what the other reads.
        count = len(row.response_ids) - 1 - levels
        place = group.batch.starts[text] - 1 + torch.arange(count)
        mine = slice(records.firsts[text], records.firsts[text] + count)
        for depth, nodes in ((1, 3), (3, 12), (5, 6), (5, 40)):
            grown = Round(group, torch.full((count,), text), place, torch.full((count,), -1))
            accepted = grown.accepted(Size(nodes, depth, top_k))
            assert tables.trees(records, depth, nodes).accepted[mine].tolist() == accepted.tolist()
            seen += int(accepted.sum())
        chain = Round(group, torch.full((count,), text), place, torch.full((count,), -1))
        assert tables.chains(records, 4).accepted[mine].tolist() == chain.accepted(Size(4, 4, 1)).tolist()
    assert seen > 20, "nothing was accepted"
    # A path that has k nodes before it has a k-th log-probability: the first node's is of one token.
    assert (np.diff(records.log_probs) <= 0).all() and (records.log_probs <= 0).all()
    firsts = records.log_probs[:, 0]
    with torch.no_grad():
        states = Round(group, torch.zeros(1, dtype=torch.int64), group.batch.starts[:1] - 1, torch.full((1,), -1))
        _, _, state = states._level(0, states.root[:, None], states.root_state[:, None], torch.zeros(1, 1, 0).bool(), 1)
        best = model.lm_head(model.norm(state[:, 0])).log_softmax(-1).amax()
    assert firsts[0] == pytest.approx(float(best), rel=1e-4)
    shallow = heterospec_offline.record(model, target, rows, tree, tree.depth)
    np.testing.assert_allclose(records.phi, shallow["phi"].numpy(), rtol=1e-5)
    assert (records.phi > 0).all() and (records.phi < 3 * np.log(top_k) + 1e-4).all()
    np.testing.assert_allclose(records.entropies[:, 0], records.chain_entropies[:, 0], rtol=1e-5)
    assert (records.chain_entropies[:, 0] > records.phi / 3).any(), "of the whole vocabulary, and not sharpened"
    # No distribution of this entropy has a likeliest token that is less likely than so.
    assert (records.chain_confidences >= np.exp(-records.chain_entropies) - 1e-5).all()
    with torch.no_grad():
        model.lm_head.weight.div_(SHARPNESS)
    plain = heterospec_offline.record(model, target, rows, tree._replace(sharpness=1.0), tree.depth)
    with torch.no_grad():
        model.lm_head.weight.mul_(SHARPNESS)
    np.testing.assert_allclose(
        records.chain_confidences[:, : tree.depth], plain["chain_confidences"].numpy(), rtol=1e-4
    )


def test_ranks_are_places_in_a_stable_order():
    generator = torch.Generator().manual_seed(0)
    top_k, levels, num_reqs = 3, 4, 50
    log_probs = -torch.randint(0, 9, (num_reqs, top_k + (levels - 1) * top_k**2), generator=generator).float()
    ends = [top_k + level * top_k**2 for level in range(levels)]
    firsts = [0, *ends[:-1]]
    found = torch.stack(
        [torch.randint(a, b, (num_reqs,), generator=generator) for a, b in zip(firsts, ends, strict=True)], 1
    )
    found[::7, 2:] = -1
    ranks = heterospec_offline.ranks_of(log_probs, found, top_k)
    for row in range(num_reqs):
        for depth, end in enumerate(ends):
            order = sorted(range(end), key=lambda i: -float(log_probs[row, i]))
            for level in range(levels):
                candidate = int(found[row, level])
                expected = order.index(candidate) + 1 if 0 <= candidate < end else 0
                assert int(ranks[row, level, depth]) == expected


TREE = TreeShape(4, 4, 20)


def made_up(num_texts=40, levels=6, seed=0):
    """Records whose surer places accept more, at better ranks; texts of two kinds, in turns."""
    generator = np.random.default_rng(seed)
    counts = generator.integers(30, 50, num_texts)
    num_places = counts.sum()
    phi = (generator.random(num_places) * 5).astype(np.float32)
    length = np.minimum(generator.geometric(0.08 + phi / 12) - 1, levels)
    steps = 1 + (phi[:, None] * generator.random((num_places, levels))).astype(int)
    firsts = (steps.cumsum(1))[:, :, None] + np.arange(levels)[None, None] // 2
    on_path = np.arange(levels)[None, :, None] < length[:, None, None]
    ranks = np.where(on_path & (np.arange(levels)[None, :, None] <= np.arange(levels)), firsts, 0)
    # No draft is accepted past the end of its text; the token behind it may lie there.
    left = np.concatenate([np.arange(count, 0, -1) for count in counts])
    ranks = np.where(np.arange(levels)[None, :, None] < left[:, None, None], ranks, 0).astype(np.int16)
    tensors = {
        "ranks": torch.from_numpy(ranks),
        "phi": torch.from_numpy(phi),
        "log_probs": torch.from_numpy(-np.sort(generator.random((num_places, TREE.num_nodes)).astype(np.float32) * 9)),
        "entropies": torch.from_numpy(generator.random((num_places, levels)).astype(np.float32) * 3),
        "chain": torch.from_numpy(np.minimum(length // 2, left).astype(np.int16)),
        "chain_entropies": torch.from_numpy(generator.random((num_places, levels)).astype(np.float32) * 3),
        "chain_confidences": torch.from_numpy(generator.random((num_places, levels)).astype(np.float32)),
    }
    return tensors, counts, ["math", "chat"] * (num_texts // 2), TREE, levels


def decoded(records, drafts):
    """Calls, rows and passes of every text, by a plain loop."""
    found = []
    for first, count in zip(records.firsts, records.counts, strict=True):
        at, spent = 0, [0, 0, 0]
        while at < count:
            for which, number in enumerate((1, drafts.rows[first + at], drafts.passes[first + at])):
                spent[which] += number
            at += drafts.accepted[first + at] + 1
        assert at - count in (0, 1)
        found.append(spent)
    return np.array(found).T


def test_a_walk_adds_up_the_rounds():
    records = records_of(*made_up())
    policy = AdaptivePolicy((1.0, 2.0), (2, 1, 0), (8, 12, 20))
    drafts = tables.sized(records, policy)
    bins = [policy.bin_of(float(x)) for x in records.phi]
    assert drafts.passes.tolist() == [4 + policy.extensions[i] for i in bins]
    assert drafts.rows.tolist() == [policy.widths[i] + 1 for i in bins]
    expected = [
        sum(0 < rank <= policy.widths[i] for rank in ranks[:, 3 + policy.extensions[i]])
        for ranks, i in zip(records.ranks, bins, strict=True)
    ]
    assert drafts.accepted.tolist() == expected
    counts, places = tables.walk(records, drafts)
    assert np.array_equal(np.stack(counts[1:]), decoded(records, drafts))
    assert counts.tokens.tolist() == records.counts.tolist() and len(places) == counts.calls.sum()


def test_rounds_past_a_texts_end_are_not_fitted_to():
    records = records_of(*made_up())
    one = tables.halves(records)
    assert one.sum() == 20 and np.array(records.categories)[one].tolist().count("math") == 10
    rounds = tables.base_rounds(records, one)
    assert set(rounds.text.tolist()) == set(np.flatnonzero(one).tolist())
    drafts = tables.fixed(records)
    inside = 0
    for first, count in zip(records.firsts[one], records.counts[one], strict=True):
        at = 0
        while at + drafts.accepted[first + at] + 1 <= count:
            inside += 1
            at += drafts.accepted[first + at] + 1
            if at == count:
                break
    assert len(rounds.phi) == inside
    assert rounds.accepted.max() == 4 and rounds.rank.max() <= 20


def test_adaedl_stops_behind_the_first_unsure_level():
    """1 - sqrt(0.2 H) is 1 at no entropy, 0.553 at 1 nat and 0.368 at 2."""
    entropies = np.array([[0.0, 1.0, 2.0, 0.0], [2.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 2.0]])
    assert tables.adaedl(entropies, 0.5, 4).tolist() == [3, 1, 4]
    assert tables.adaedl(entropies, 0.6, 4).tolist() == [2, 1, 4]
    assert tables.adaedl(entropies, 0.3, 4).tolist() == [4, 4, 4]
    assert tables.adaedl(entropies, 0.5, 2).tolist() == [2, 1, 2]


def test_chains_end_behind_a_choice_that_is_not_sure():
    confidences = np.array([[0.9, 0.3, 0.9], [0.8, 0.7, 0.6], [0.1, 1.0, 1.0]])
    assert tables.confident(confidences, 0.4).tolist() == [2, 3, 1]
    assert tables.likely(confidences, 0.4).tolist() == [2, 3, 1]
    assert tables.likely(confidences, 0.57).tolist() == [2, 2, 1]


def test_trees_without_unlikely_nodes():
    tensors, counts, categories, tree, levels = made_up()
    tensors["log_probs"] = torch.full_like(tensors["log_probs"], np.log(0.001))
    tensors["log_probs"][::2, :7] = np.log(0.02)
    records = records_of(tensors, counts, categories, tree, levels)
    drafts = tables.likely_nodes(records, 0.01)
    assert set(drafts.rows[::2].tolist()) == {8} and set(drafts.rows[1::2].tolist()) == {2}
    assert set(drafts.passes.tolist()) == {tree.depth}
    assert (drafts.accepted <= tables.fixed(records).accepted).all()


def test_chains_go_by_the_last_round():
    """Begun at half of the longest: 3. A place's chain is all accepted or as much as its text has of it."""
    tensors, _, categories, tree, levels = made_up(2)
    tensors = {name: tensor[:24] for name, tensor in tensors.items()}
    tensors["chain"] = torch.tensor([6] * 12 + [0] * 12, dtype=torch.int16)
    counts = tables.paced(records_of(tensors, [12, 12], categories[:2], tree, levels), 6)
    # 3 + 1, then 5 + 1, then 2 of the 6 that are left; and 3, 2, then single tokens, none of which is right.
    assert counts.calls.tolist() == [3, 12] and counts.passes.tolist() == [3 + 5 + 6, 3 + 2 + 10]
    assert counts.rows.tolist() == [17, 27]


def test_no_text_chooses_its_own_bins():
    records = records_of(*made_up())
    asked = []

    def policy_of(fitted):
        asked.append(fitted)
        return AdaptivePolicy((float(len(asked)),), (1, 0), (6 + len(asked), 20))

    drafts = tables.by_halves(records, policy_of)
    one = tables.halves(records)
    assert np.array_equal(asked[0], one) and np.array_equal(asked[1], ~one)
    judged = np.repeat(one, records.counts)
    assert set(drafts.rows[~judged].tolist()) == {8, 21} and set(drafts.rows[judged].tolist()) == {9, 21}
    with pytest.raises(AssertionError):
        tables.judged(records, policy_of, [(one, one)])


# -- the commands ---------------------------------------------------------------------------------------------


def written(folder, sampled=False):
    tensors, counts, categories, tree, levels = made_up()
    facts = heterospec_offline.Facts(Identity("t", "a", "b"), Identity("d", "a", "b"), tree, levels, sampled)
    folder.mkdir()
    (folder / heterospec_offline.INDEX_FILE).write_text(json.dumps({"rows": len(counts)}))
    listed = [[i, name, int(count)] for i, (name, count) in enumerate(zip(categories, counts, strict=True))]
    write_shard(shard_path(folder, 0), tensors, heterospec_offline._json(facts), listed)
    return folder


@pytest.mark.parametrize("name", tables.TABLES)
def test_every_table_is_made(name, tmp_path):
    folder = written(tmp_path / "trees", sampled=name == "table-9")
    rows, shown = make_table(tmp_path, "heterospec", name, "--records", folder)
    assert shown.startswith("**") and "texts" in shown and len(rows) > 1
    if name == "table-2":
        records = heterospec_offline.read(folder)
        base, both = rows[0], rows[3]
        expected = decoded(records, tables.by_halves(records, lambda texts: tables.fit(records, texts).policy()))
        before = decoded(records, tables.fixed(records))
        for number, cost in enumerate(tables.COST_NAMES):
            assert base[cost] == before[number].sum() and both[cost] == expected[number].sum()
            change = 100 * (both[cost] / base[cost] - 1)
            assert both[f"{cost}, percent"][0] == pytest.approx(change)


def test_records_that_do_not_fit_are_one_sentence(tmp_path):
    folder = written(tmp_path / "trees")
    assert "temperature 1 (--sampled)" in refusal("heterospec", "table-9", "--records", folder)
    (folder / heterospec_offline.INDEX_FILE).write_text(json.dumps({"rows": 41}))
    assert "holds 40 of 41 texts" in refusal("heterospec", "table-2", "--records", folder)
    assert "holds no records" in refusal("heterospec", "table-2", "--records", tmp_path)


def test_a_stopped_recording_goes_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(heterospec_offline, "SHARD_TEXTS", 2)
    responses = tmp_path / "responses"
    responses.mkdir()
    write_responses(responses / "dev-00000.jsonl.gz", texts())
    options = ["--responses", responses, "--depth", "2", "--top-k", "3", "--nodes", "6", "--out", tmp_path / "trees"]
    options = list(map(str, options))
    assert heterospec_offline.main(options) == 0
    first, second = (shard_path(tmp_path / "trees", number) for number in range(2))
    kept, made = first.stat().st_mtime_ns, load_file(second)
    second.unlink()
    assert heterospec_offline.main(options) == 0
    assert first.stat().st_mtime_ns == kept and len(made) == len(heterospec_offline.NAMES)
    assert all(torch.equal(tensor, made[name]) for name, tensor in load_file(second).items())
    assert heterospec_offline.main([*options, "--sharpness", "1.1"]) == 2
    assert "holds records with another tree" in " ".join(capsys.readouterr().err.split())
    assert heterospec_offline.main([*options, "--sampled"]) == 2
    assert "no sampled response of dev" in " ".join(capsys.readouterr().err.split())
    write_responses(responses / "train-00000.jsonl.gz", [row._replace(greedy=False) for row in texts()[:1]])
    options[-1] += "-sampled"
    assert heterospec_offline.main([*options, "--split", "train", "--sampled"]) == 0
    facts = heterospec_offline.read(Path(options[-1])).facts
    assert facts.sampled and facts.tree.sharpness == 1.0
