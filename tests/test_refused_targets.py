"""Targets whose layers hold no draft tree are refused in one sentence, from their configs alone."""

from types import SimpleNamespace

import pytest

from vllm_crossspec.frontend.refuse import check_target

FACTS = {"model": "m", "is_hybrid": False, "is_attention_free": False, "use_mla": False, "uses_mrope": False}


def target(window=None, **facts):
    return SimpleNamespace(**(FACTS | facts), get_sliding_window=lambda: window)


TREES = SimpleNamespace(has_trees=True, contemplates=False)
CHAINS = SimpleNamespace(has_trees=False, contemplates=False)
FUTURES = SimpleNamespace(has_trees=True, contemplates=True)


@pytest.mark.parametrize(
    ("facts", "what"),
    [
        ({"is_hybrid": True}, r"recurrent \(mamba\) layers"),
        ({"is_attention_free": True}, r"recurrent \(mamba\) layers"),
        ({"use_mla": True}, r"latent attention \(MLA\)"),
        ({"use_mla": True, "is_hybrid": True}, r"recurrent \(mamba\) layers and latent attention \(MLA\)"),
    ],
    ids=["recurrent", "recurrent-only", "mla", "mla-recurrent"],
)
def test_trees_are_refused_and_chains_are_not(facts, what):
    with pytest.raises(ValueError, match=f'm has {what}, over which .* use "tree": .*"chain"'):
        check_target(TREES, target(**facts))
    check_target(CHAINS, target(**facts))


@pytest.mark.parametrize("facts", [{}, {"uses_mrope": True}, {"window": 128}], ids=["plain", "mrope", "sliding"])
def test_others_hold_trees(facts):
    check_target(TREES, target(**facts))


def test_futures_are_refused_over_sliding_windows():
    """Soft prompts stand in front of the text, and a window ends before them."""
    with pytest.raises(ValueError, match='m has sliding-window attention, over which .* use "tree": .*"chain"'):
        check_target(FUTURES, target(window=128))
