"""research/papers/goodput.py: what routing by experience gets of records at a table's costs."""

import json

import pytest
from documents import ROOT
from made_tables import make_table
from papers import goodput
from test_router_training import made_up_records

from crossspec_tools.records import simulate


def costs_file(folder, tree_seconds):
    """Of two drafters, the second of which takes 10 ms a round."""
    rows = {"draft": [[tree_seconds, 0.0]], "verify": [[0.01, 0.01]], "switch": [[0.0, 0.0]]}
    file = folder / "costs.json"
    file.write_text(json.dumps({"drafters": ["eagle3", "dflash"], "batch_sizes": [1], **rows}))
    return file


def row_of(folder, *words):
    """The only row of the table of some records."""
    (row,), _ = make_table(folder, "goodput", "costs", "--records", folder / "records", *words)
    return row


@pytest.mark.parametrize(("tree_seconds", "best"), [(0.0, "eagle3"), (0.05, "dflash")])
def test_the_table(tmp_path, tree_seconds, best):
    """The first drafter yields 5 tokens or 1, told by the entropy, the second 3: worth routing, if it costs no more."""
    made_up_records(tmp_path / "records")
    costs = str(costs_file(tmp_path, tree_seconds))
    row = row_of(tmp_path, "--costs", costs, "--batch-sizes", "1", "--orders", "3")
    found, last = ([ratios["mean"] for ratios in row["ratios"][name]] for name in ("goodput", "goodput, left out"))
    (of_rounds,), (of_texts,) = row["ratios"]["best arm of every round"], row["ratios"]["best arm of every text"]
    assert row["arms"]["mean"] == best and len(found) == 3 and len(set(found)) > 1
    if tree_seconds:
        assert of_rounds["mean"] == of_texts["mean"] == pytest.approx(1.0)
        assert all(0.9 < ratio <= 1.0 for ratio in found + last), "what trying costs"
    else:
        assert of_rounds["mean"] > 1.1 and of_rounds["mean"] >= of_texts["mean"] >= 1.0
        assert all(1.02 < ratio <= of_rounds["mean"] for ratio in found + last), "the entropy tells"
    assert len(last) == 3


def test_rounds_are_equal_without_costs_and_a_kind_comes_after_the_others(tmp_path, monkeypatch):
    made_up_records(tmp_path / "records")
    records, orders = goodput.read_records(tmp_path / "records"), []
    rule = goodput.goodput_rule
    monkeypatch.setattr(goodput, "goodput_rule", lambda *given: orders.append(given[2]) or rule(*given))
    row = row_of(tmp_path, "--orders", "1")
    assert row["costs"] == "equal rounds"
    paths = goodput.trajectories(records)
    for category, texts in goodput.groups_of(records).items():
        alone = [simulate.walk(paths, simulate.always(i)).of(texts).acceptance_length for i in range(2)]
        assert row["best"][category] == pytest.approx(max(alone)), "tokens a round"
    mixed, *left_out = [[records.texts[text].category for text in order] for order in orders]
    assert mixed == ["chat", "math"] * 30
    assert left_out == [["math"] * 30 + ["chat"] * 30, ["chat"] * 30 + ["math"] * 30]


def test_halves_are_other_texts(tmp_path):
    made_up_records(tmp_path / "records")
    words = ["--records", tmp_path / "records", "--costs", costs_file(tmp_path, 0.0), "--batch-sizes", "1"]
    found = [
        make_table(tmp_path, "goodput", "costs", *words, "--orders", "1", "--half", half) for half in ("even", "odd")
    ]
    assert all("30 texts" in shown for _, shown in found)
    assert len({row["best"]["mean"] for (row,), _ in found}) == 2


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks" / "costs").glob("*.json")), ids=lambda file: file.stem)
def test_the_shipped_tables_are_of_the_shipped_arms(file):
    from vllm_crossspec.load.costs import read_costs

    spec = json.loads((ROOT / "configs" / "pocket-whiflash-goodput.json").read_text())
    found = read_costs(file, tuple(spec["drafters"]), "--costs")
    owners = [spec["drafters"][name].get("of", name) for name in spec["drafters"]]
    assert [list(spec["drafters"])[owner] for owner in found.owners] == owners
    plain = list(spec["drafters"]).index("plain")
    assert all(seconds[plain] == min(seconds) for seconds in found.draft)
