"""research/load_model.py: what it reads of records, and that its choices are those of the figures it has."""

import itertools
import json

import load_model
import numpy as np
import pytest
from heterospec_offline import Facts, Records
from load_model import Machine, Model, Trees

from vllm_crossspec.heterospec.calibration import TreeShape
from vllm_crossspec.kinds.identity import Identity

NODES, DEPTH = 60, 8


def made_trees(num_nodes=NODES, depth=DEPTH, top_k=10, places=400, seed=0):
    """Texts whose next tokens are the node of a rank that is drawn: deeper ones later, if at all."""
    rng = np.random.default_rng(seed)
    log_probs = -np.sort(rng.exponential(0.7, (places, num_nodes)).cumsum(1) * 0.4, axis=1)
    hits = rng.random((places, num_nodes)) < np.exp(log_probs)
    return Trees(depth, top_k, hits, log_probs, np.arange(0, places + 1, 100))


def model(scale=1.0, **machine):
    trees = [made_trees(), made_trees(20, 5, 5), made_trees(8, 3, 3)]
    return Model(trees, np.minimum(trees[0].accepted(7), 5), Machine(**machine), scale)


def test_a_path_ends_with_its_first_node_that_was_not_kept(monkeypatch):
    ranks = np.zeros((3, 4, 4), dtype=np.int16)
    ranks[0, :, 2] = [1, 5, 3, 0]  # the second is not among the four kept
    ranks[1, :, 2] = [2, 3, 4, 9]
    tree = TreeShape(3, 2, 4, 1.0)
    facts = Facts(*(Identity(name, "0", None) for name in "td"), tree, 4, False)
    zeros = np.zeros((3, 4))
    records = Records(
        ranks, zeros[:, 0], zeros, zeros, ranks[:, 0, 0], zeros, zeros, np.array([2, 1]), ["a", "b"], facts
    )
    monkeypatch.setattr(load_model.heterospec_offline, "read", lambda folder: records)
    found = load_model.read_trees(None)
    assert found.hits.tolist() == [[True, False, False, False], [False, True, True, True], [False] * 4]
    assert found.firsts.tolist() == [0, 2, 3]
    assert [found.accepted(width).tolist() for width in (1, 3)] == [[1, 0, 0], [1, 2, 0]]


def test_rounds_begin_behind_what_was_accepted():
    accepted = np.array([2, 9, 9, 0, 1, 0, 5])
    assert load_model.places_of_rounds(accepted, np.array([0, 5, 7])).tolist() == [0, 3, 4, 5, 6]


def test_a_machine_waits_and_then_computes():
    machine = Machine()
    assert machine.step(1, 1) == pytest.approx(7.07, abs=0.05), "measured on an H100"
    assert machine.step(488, 8) == pytest.approx(13.55, abs=0.5)
    assert machine.step(256, 32) == pytest.approx(9.8, abs=0.9)
    steps = [machine.step(rows, 1) for rows in range(1, 2000, 50)]
    assert all(a < b for a, b in itertools.pairwise(steps))
    assert machine.draft(3, 3, 1) < machine.draft(5, 5, 1) < machine.draft(8, 10, 64)


def test_widths_the_schedule_and_the_budget_agree_on_the_figures():
    found = model()
    assert found.times_plain(0, 8) == pytest.approx(1.0)
    (row,) = load_model.table(found, [16], 0)
    assert row["best"] >= max(row["widths"].values())
    assert row["auto"] > 0.95 * max(row["widths"].values()), "tries of other widths cost little"
    assert row["joint"] > row["best"], "chances that are right choose better than a width"
    dear = load_model.table(model(head=20.0), [16], 0)[0]
    assert dear["best"] < 1 < dear["auto"] + 0.05 and set(dear["rounds"]) >= {0}


def test_scaled_drafts_are_fewer_tokens():
    whole, part = model(), model(scale=0.6)
    assert part.rounds(60).mean() - 1 == pytest.approx(0.6 * (whole.rounds(60).mean() - 1))
    assert part.chain(4, 1) < whole.chain(4, 1)


def test_it_prints_a_row_a_batch(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(load_model, "read_trees", lambda folder: made_trees())
    monkeypatch.setattr(
        load_model.heterospec_offline, "read", lambda folder: type("R", (), {"chain": np.zeros(400, dtype=np.int16)})
    )
    out = tmp_path / "rows.json"
    assert load_model.main(["--records", "a", "--batches", "1", "64", "--json", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| 1 | 7.0 |") and lines[3].startswith("| 64 |") and len(lines) == 4
    assert [row["batch"] for row in json.loads(out.read_text())] == [1, 64]
