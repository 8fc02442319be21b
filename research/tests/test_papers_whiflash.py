"""research/papers/whiflash.py: thresholds of the other half, backlogs and weights by hand, every table made."""

from pathlib import Path

import numpy as np
import pytest
import torch
from intervals import Walk
from made_tables import make_table, refusal
from papers import whiflash
from safetensors.torch import load_file
from shapes import SHAPES
from test_router_training import QUICK, made_up_records

import vllm_crossspec
from crossspec_tools.records import simulate
from crossspec_tools.train.router import train_router
from vllm_crossspec.routing.checkpoint import save_router

POCKET = Path(vllm_crossspec.__file__).parent / "pocket"


def test_every_text_goes_by_what_is_best_on_the_others():
    """Texts 0, 2 and 1, 3 of a category are halves; a threshold of 1 is best for the first, one of 2 for the others."""
    groups = {"a": [0, 1, 2, 3], "b": [4, 5, 6, 7]}
    ones = np.ones(8, dtype=np.int64)
    at = {
        1.0: Walk(np.array([9, 1, 9, 1, 5, 3, 5, 3]), ones),
        2.0: Walk(np.array([2, 8, 2, 8, 3, 4, 3, 4]), ones),
    }
    own = whiflash.crossed(at, groups, by_category=True)
    assert own.tokens.tolist() == [2, 1, 2, 1, 3, 3, 3, 3]  # each the other half's choice, which is the worse one here
    # On the mean of the categories 1 is best for texts 0, 2, 4, 6 and 2 for the others: the same choices.
    assert whiflash.crossed(at, groups, by_category=False).tokens.tolist() == own.tokens.tolist()
    at[2.0].tokens[[5, 7]] = 20  # now 2 is best for the odd texts by far, so the even ones go by it
    assert whiflash.crossed(at, groups, by_category=False).tokens.tolist() == [2, 1, 2, 1, 3, 3, 3, 3]
    at[1.0].tokens[[1, 3]] = 7
    assert whiflash.crossed(at, groups, by_category=True).tokens[:4].tolist() == [2, 7, 2, 7]


def test_every_category_goes_by_what_is_best_on_the_others():
    groups = {"a": [0, 1], "b": [2, 3], "c": [4]}
    ones = np.ones(5, dtype=np.int64)
    at = {1.0: Walk(np.array([1, 1, 9, 9, 3]), ones), 2.0: Walk(np.array([8, 8, 2, 2, 4]), ones)}
    # b and c together prefer 1, a and c 2; a and b have 5 of either, and the first of equals is taken.
    assert whiflash.of_others(at, groups).tokens.tolist() == [1, 1, 2, 2, 3]


def test_backlogs_by_hand():
    """One text of 8 tokens, rounds of 2 and 1: drafter 0, 0, 1, 1, 0; the other was last told at its round before."""
    paths = simulate.Trajectories(
        torch.tensor([[2, 1]] * 8), torch.arange(8, 0, -1), torch.tensor([0]), torch.tensor([8])
    )
    chosen = torch.tensor([0, 9, 0, 9, 1, 1, 0, 9])
    assert whiflash.backlogs(paths, simulate.by_record(chosen)).tolist() == [4, 4]


@pytest.mark.parametrize(
    ("folder", "part", "changes"),
    [
        ("target", "target", {}),
        ("eagle3", "eagle3", {"draft_vocab_size": 3072}),
        ("dflash", "dflash", {"intermediate_size": 1024}),
        ("router", "router", {}),
    ],
)
def test_weights_are_counted(folder, part, changes):
    """Against the pocket's files; which tokens a drafter knows is no weight."""
    tensors = load_file(POCKET / folder / "model.safetensors")
    count = sum(tensor.numel() for name, tensor in tensors.items() if name not in ("d2t", "t2d"))
    assert count == whiflash.parameters(SHAPES["pocket"]._replace(**changes))[part]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whiflash")
    data = made_up_records(folder / "records", num_texts=24)
    checkpoint, _ = train_router(data, QUICK)
    save_router(folder / "router", checkpoint)
    return ["--records", str(folder / "records"), "--router", str(folder / "router")]


@pytest.mark.parametrize("table", ["table-1", "table-2", "left-out", "figure-2", "backlogs", "table-13"])
def test_tables_are_made(table, folders, tmp_path):
    given = folders if table != "table-13" else []
    found, shown = make_table(tmp_path, "whiflash", table, *given)
    assert shown.startswith("**") and "| --- |" in shown
    rows = {(row["row"], row.get("method"), row.get("category")): row for row in found}
    if table == "table-1":  # what the routers learned is a rule: they get nearly what the oracle gets
        means = {name: row["mean"][0] for (name, *_), row in rows.items()}
        assert means["oracle-token"] >= means["neural, one threshold"] > 1.1 * max(means["eagle3"], means["dflash"])
        low, high = rows["neural, one threshold", None, None]["gain_percent"][1:]
        assert 0 < low < high
    if table == "figure-2":
        assert all(0.99 < sum(row["better"]) <= 1.0 for row in rows.values())


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["table-1", "--records", "."], "holds no records.json"),
        (["table-13", "--shapes", "70b"], "--shapes 70b: choose from 4b, 8b"),
    ],
)
def test_one_sentence(given, sentence):
    said = refusal("whiflash", *given)
    assert sentence in said and said.count("\n") == 1
