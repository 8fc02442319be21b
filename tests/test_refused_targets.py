"""Targets whose layers hold no draft tree are refused in one sentence, from their configs alone."""

from types import SimpleNamespace

import pytest

from vllm_crossspec.engine.frontend.refuse import check_target

FACTS = {"model": "m", "is_hybrid": False, "is_attention_free": False, "use_mla": False, "uses_mrope": False}


def target(window=None, **facts):
    return SimpleNamespace(**(FACTS | facts), get_sliding_window=lambda: window)


@pytest.mark.parametrize(
    ("facts", "what"),
    [
        ({"is_hybrid": True}, r"recurrent \(mamba\) layers"),
        ({"is_attention_free": True}, r"recurrent \(mamba\) layers"),
        ({"use_mla": True}, r"latent attention \(MLA\)"),
        ({"window": 128}, "sliding-window attention"),
        ({"use_mla": True, "is_hybrid": True}, r"recurrent \(mamba\) layers and latent attention \(MLA\)"),
    ],
    ids=["recurrent", "recurrent-only", "mla", "window", "mla-recurrent"],
)
def test_trees_are_refused_and_chains_are_not(facts, what):
    with pytest.raises(ValueError, match=f'm has {what}, over which .* use "tree": .*"chain"'):
        check_target(SimpleNamespace(has_trees=True), target(**facts))
    check_target(SimpleNamespace(has_trees=False), target(**facts))


@pytest.mark.parametrize("facts", [{}, {"uses_mrope": True}], ids=["plain", "mrope"])
def test_others_hold_trees(facts):
    check_target(SimpleNamespace(has_trees=True), target(**facts))
