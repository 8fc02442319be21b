"""Targets with experts: the pocket one, of which they are made without a change, and a random one that chooses."""

import engines
import pytest
import sabotage
import target_kinds

pytestmark = pytest.mark.e2e

ROUTED = {**engines.both("dflash"), "router": {"policy": "entropy", "threshold": 1.0}}
SPECS = {
    "eagle3": engines.ours("eagle3", engines.EAGLE3),
    "eagle3-tree": engines.tree("eagle3", engines.EAGLE3, num_nodes=24),
    "dflash-tree": engines.tree("dflash", engines.DFLASH, num_nodes=24),
    "whiflash": ROUTED,
}


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """The pocket target, each MLP in four experts that are all active."""
    return target_kinds.write_pocket_moe(tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def plain(split):
    return target_kinds.run(None, split, engines.prompts(4)).texts


@pytest.mark.parametrize("name", SPECS)
def test_moe_text_is_plains_and_acceptance_the_dense_targets(split, plain, name):
    found = target_kinds.run(SPECS[name], split, engines.prompts(4))
    dense = target_kinds.run(SPECS[name], engines.TARGET, engines.prompts(4)).counts
    assert found.texts == plain
    assert found.counts.accepted / found.counts.drafts > 1
    assert found.counts.accepted / found.counts.drafts == pytest.approx(dense.accepted / dense.drafts, rel=0.02)


def test_moe_splitting_is_what_keeps_acceptance_and_verification_the_text(split, plain, tmp_path):
    """Experts that stand for another MLP: other text, few drafts; what is accepted unseen changes the text."""
    other = target_kinds.write_pocket_moe(tmp_path / "other", scale=0.25)
    found = target_kinds.run(SPECS["eagle3-tree"], other, engines.prompts(4))
    assert found.texts != plain and found.counts.accepted < found.counts.drafts
    with engines.engine(SPECS["eagle3-tree"], model=split) as llm:
        llm.collective_rpc(sabotage.accept_everything)
        assert target_kinds.answers(llm, engines.prompts(4)).texts != plain


@pytest.fixture(scope="module")
def choosing(tmp_path_factory):
    """A random Qwen3-MoE: two of eight experts for every token, beside a dense first layer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **target_kinds.SMALL,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        mlp_only_layers=[0],
    )
    return target_kinds.write_random(tmp_path_factory.mktemp("choosing"), config, Qwen3MoeForCausalLM)


def test_moe_whose_tokens_choose_their_experts(choosing):
    plain = target_kinds.run(None, choosing)
    itself = {"method": "draft_model", "model": str(choosing), "tree": {"depth": 4, "top_k": 3, "num_nodes": 12}}
    for spec in (*target_kinds.LOOKUPS.values(), itself):
        found = target_kinds.run(spec, choosing)
        assert found.texts == plain.texts
        assert found.counts.accepted > 20
