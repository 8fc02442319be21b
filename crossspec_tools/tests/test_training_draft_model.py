"""The distilled draft model: how it begins, and its held-out acceptance against a real loop of drafts."""

from dataclasses import replace

import pytest
import torch
from tiny_training import DEPTH, DRAFT_MODEL, frozen_target, random_rows

from crossspec_tools.train import draft_model
from crossspec_tools.train.acceptance import measure
from crossspec_tools.train.draft_model import build_draft_model
from crossspec_tools.train.drafter_run import offline_acceptance
from crossspec_tools.train.generations import Generation


@pytest.fixture
def target(target_folder):
    return frozen_target(target_folder, (0,))


def test_with_all_layers_it_begins_as_the_target(target):
    model = build_draft_model(replace(DRAFT_MODEL, num_layers=DEPTH, intermediate_size=48), target, seed=0)
    tokens = torch.randint(0, 200, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=tokens).logits, target.model(input_ids=tokens).logits)
        fewer = build_draft_model(DRAFT_MODEL, target, seed=0)
        assert (fewer(input_ids=tokens).logits - target.model(input_ids=tokens).logits).abs().max() > 0.1


def test_the_heaviest_neurons_stay(target):
    with torch.no_grad():
        target.model.model.layers[0].mlp.down_proj.weight[:, 5] *= 100
        target.model.model.layers[0].mlp.down_proj.weight[:, 7] *= 0.001
    mlp, wide = (m.model.layers[0].mlp for m in (build_draft_model(DRAFT_MODEL, target, seed=0), target.model))
    rows = {tuple(row.tolist()) for row in mlp.gate_proj.weight}
    assert tuple(wide.gate_proj.weight[5].tolist()) in rows and tuple(wide.gate_proj.weight[7].tolist()) not in rows


def test_one_pass_measures_what_a_loop_of_drafts_would(target):
    """The rows are the draft model's own greedy text with errors, so that some drafts are right and some are not."""
    model, rows = build_draft_model(DRAFT_MODEL, target, seed=0), []
    for row in random_rows(6, seed=1):
        tokens = torch.tensor([row.prompt_ids])
        text = model.generate(tokens, max_new_tokens=14, do_sample=False, eos_token_id=None)[0, len(row.prompt_ids) :]
        text[5], text[11] = 0, 1
        rows.append(Generation(row.prompt_ids, text.tolist(), "chat", True))

    def loop(batch, anchors):
        drafts = torch.zeros(*anchors.shape, DRAFT_MODEL.num_drafts, dtype=torch.int64)
        for row, places in enumerate(anchors.tolist()):
            for column, place in enumerate(places):
                start = batch.tokens[row : row + 1, : place + 1]
                out = model.generate(start, max_new_tokens=DRAFT_MODEL.num_drafts, do_sample=False, eos_token_id=None)
                drafts[row, column] = out[0, place + 1 :]
        return drafts

    expected = measure(rows, loop, DRAFT_MODEL.num_drafts)
    assert 1 < expected["dev_accept"] < 1 + DRAFT_MODEL.num_drafts
    one_pass = lambda batch, anchors: draft_model.drafts(model, batch, anchors, DRAFT_MODEL.num_drafts)  # noqa: E731
    assert offline_acceptance(model, target, rows, one_pass, DRAFT_MODEL.num_drafts) == expected
