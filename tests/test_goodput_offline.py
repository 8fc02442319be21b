"""benchmarks/goodput_offline.py: what routing by experience gets of records at a table's costs."""

import json
import sys
from pathlib import Path

import pytest
from test_router_training import made_up_records

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import goodput_offline  # noqa: E402

from vllm_crossspec.router import simulate  # noqa: E402


def costs_file(folder, tree_seconds):
    """Of two drafters, the second of which takes 10 ms a round."""
    rows = {"draft": [[tree_seconds, 0.0]], "verify": [[0.01, 0.01]], "switch": [[0.0, 0.0]]}
    file = folder / "costs.json"
    file.write_text(json.dumps({"drafters": ["eagle3", "dflash"], "batch_sizes": [1], **rows}))
    return file


@pytest.mark.parametrize(("tree_seconds", "best"), [(0.0, "eagle3"), (0.05, "dflash")])
def test_the_script(tmp_path, capsys, tree_seconds, best):
    """The first drafter yields 5 tokens or 1, told by the entropy, the second 3: worth routing, if it costs no more."""
    made_up_records(tmp_path / "records")
    out, costs = tmp_path / "out.json", costs_file(tmp_path, tree_seconds)
    arguments = ["--records", str(tmp_path / "records"), "--costs", str(costs), "--batch-sizes", "1", "--orders", "3"]
    assert goodput_offline.main([*arguments, "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    found, last = ([ratios["mean"] for ratios in row["ratios"][name]] for name in ("goodput", "goodput, left out"))
    (of_rounds,), (of_texts,) = row["ratios"]["best arm of every round"], row["ratios"]["best arm of every text"]
    assert row["arms"]["mean"] == best and len(found) == 3 and len(set(found)) > 1
    if tree_seconds:
        assert of_rounds["mean"] == of_texts["mean"] == pytest.approx(1.0)
        assert all(0.9 < ratio <= 1.0 for ratio in found + last), "what trying costs"
    else:
        assert of_rounds["mean"] > 1.1 and of_rounds["mean"] >= of_texts["mean"] >= 1.0
        assert all(1.02 < ratio <= of_rounds["mean"] for ratio in found + last), "the entropy tells"
    assert "goodput" in capsys.readouterr().out and len(last) == 3


def test_rounds_are_equal_without_costs_and_a_kind_comes_after_the_others(tmp_path, monkeypatch):
    made_up_records(tmp_path / "records")
    records, orders = goodput_offline.read_records(tmp_path / "records"), []
    rule = goodput_offline.goodput_rule
    monkeypatch.setattr(goodput_offline, "goodput_rule", lambda *given: orders.append(given[2]) or rule(*given))
    out = tmp_path / "out.json"
    assert goodput_offline.main(["--records", str(tmp_path / "records"), "--orders", "1", "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["costs"] == "equal rounds"
    paths = goodput_offline.trajectories(records, records.texts)
    for category, texts in goodput_offline.groups_of(records).items():
        alone = [simulate.walk(paths, simulate.always(i)).of(texts).acceptance_length for i in range(2)]
        assert row["best"][category] == pytest.approx(max(alone)), "tokens a round"
    mixed, *left_out = [[records.texts[text].category for text in order] for order in orders]
    assert mixed == ["chat", "math"] * 30
    assert left_out == [["math"] * 30 + ["chat"] * 30, ["chat"] * 30 + ["math"] * 30]


def test_halves_are_other_texts(tmp_path):
    made_up_records(tmp_path / "records")
    costs, tokens = costs_file(tmp_path, 0.0), []
    for half in ("even", "odd"):
        out = tmp_path / f"{half}.json"
        arguments = ["--records", str(tmp_path / "records"), "--costs", str(costs), "--batch-sizes", "1"]
        assert goodput_offline.main([*arguments, "--orders", "1", "--half", half, "--json", str(out)]) == 0
        document = json.loads(out.read_text())
        assert document["meta"]["settings"]["texts"] == 30
        tokens.append(document["rows"][0]["best"]["mean"])
    assert tokens[0] != tokens[1]


@pytest.mark.parametrize("file", sorted((BENCHMARKS / "costs").glob("*.json")), ids=lambda file: file.stem)
def test_the_shipped_tables_are_of_the_shipped_arms(file):
    from vllm_crossspec.router.costs import read_costs

    spec = json.loads((BENCHMARKS.parent / "configs" / "pocket-whiflash-goodput.json").read_text())
    found = read_costs(file, tuple(spec["drafters"]), "--costs")
    owners = [spec["drafters"][name].get("of", name) for name in spec["drafters"]]
    assert [list(spec["drafters"])[owner] for owner in found.owners] == owners
    plain = list(spec["drafters"]).index("plain")
    assert all(seconds[plain] == min(seconds) for seconds in found.draft)
