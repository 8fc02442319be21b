"""Break verification, positions or the KV cache and see the text change; break the drafter and see it not change."""

import engines
import pytest
import sabotage

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def plain_tokens():
    return engines.plain(6, 32)


@pytest.fixture(scope="module")
def llm(plain_tokens):
    # Without a prefix cache: what a broken run left there must not reach the next one.
    with engines.engine(engines.ours("dflash", engines.DFLASH), enable_prefix_caching=False) as running:
        yield running


def run_broken(llm, how):
    return engines.run_broken(llm, how, lambda llm: engines.generate(llm, engines.prompts(6), max_tokens=32))


def whole(llm):
    return run_broken(llm, sabotage.mend)


@pytest.mark.parametrize("how", [sabotage.shift_positions, sabotage.lose_draft_kv, sabotage.accept_everything])
def test_a_broken_target_pass_is_seen(llm, plain_tokens, how):
    assert whole(llm)[0] == plain_tokens
    assert run_broken(llm, how)[0] != plain_tokens
    assert whole(llm)[0] == plain_tokens


def test_a_broken_drafter_is_slow_and_never_wrong(llm, plain_tokens):
    _, accepted = whole(llm)
    tokens, accepted_broken = run_broken(llm, sabotage.swap_taps)
    assert tokens == plain_tokens
    assert accepted_broken < 0.7 * accepted
