"""The promise: with any proposer the text is the target's own, and ours draft exactly as vLLM's native methods do."""

import engines
import pytest
from engines import results

pytestmark = pytest.mark.e2e

SPECULATIVE = [
    "eagle3", "dflash", "native eagle3", "native dflash", "eagle3, rejection", "both, eagle3 drafts",
    "both, dflash drafts",
]  # fmt: skip


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("scenario", ["one", "eight", "chunked", "prefix"])
@pytest.mark.parametrize("name", SPECULATIVE)
def test_greedy_is_plain(name, scenario):
    assert results(name).tokens[scenario] == results("plain").tokens[scenario]


@pytest.mark.parametrize("name", SPECULATIVE)
def test_drafts_were_made_and_accepted(name):
    counts = results(name).counts
    assert counts.drafts > 20
    assert counts.accepted / counts.drafts > 0.5


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_same_acceptance_as_native(name):
    mine, native = results(name).counts, results(f"native {name}").counts
    assert (mine.drafts, mine.per_position) == (native.drafts, native.per_position)


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_a_second_drafter_changes_nothing(name):
    alone, together = results(name).counts, results(f"both, {name} drafts").counts
    assert together.per_position == alone.per_position


@pytest.mark.parametrize("name", ["plain", *SPECULATIVE])
def test_seeded_runs_repeat(name):
    tokens = results(name).tokens
    assert tokens["seeded again"] == tokens["seeded"]


@pytest.mark.parametrize("name", ["eagle3", "dflash", "both, eagle3 drafts", "both, dflash drafts"])
def test_seeded_text_is_plains(name):
    """Sample-and-match keeps the very tokens of a seed; the rejection sampler keeps their distribution only."""
    assert results(name).tokens["seeded"] == results("plain").tokens["seeded"]


@pytest.mark.parametrize("option", engines.OPTIONS)
@pytest.mark.parametrize("name", SPECULATIVE)
def test_options_that_vllm_refuses_beside_drafts(name, option):
    """Sample-and-match serves min_p and logit_bias, whatever drafts; vLLM's own verification goes on refusing them."""
    plain, found = results("plain").tokens[option], results(name).tokens[option]
    if "native" in name or "rejection" in name:
        assert found.startswith("The min_p and logit_bias sampling parameters are not yet supported")
    else:
        assert found == plain


def test_the_rejection_sampler_is_still_there():
    """Both verify greedy drafts alike; seeded, another uniform decides."""
    mine, other = results("eagle3"), results("eagle3, rejection")
    assert mine.counts.per_position == other.counts.per_position
    assert mine.tokens["seeded"] != other.tokens["seeded"]


def test_our_counters_say_who_drafted():
    found = results("both, dflash drafts")
    assert found.stats["eagle3"]["drafts"] == 0
    assert found.stats["dflash"]["accepted_tokens"] == found.counts.accepted
    assert found.stats["dflash"]["accepted_per_position"] == found.counts.per_position
    # vLLM also counts the placeholder drafts with which the scheduler pads a cached prompt.
    assert 0 < found.stats["dflash"]["drafts"] <= found.counts.drafts


def test_plain_and_native_engines_have_no_counters_of_ours():
    assert results("plain").stats is None
    assert results("native eagle3").stats is None


@pytest.mark.parametrize("num_tokens", [3, engines.K])
def test_a_dflash_in_other_blocks_than_it_learned_is_spoken_of(num_tokens, monkeypatch):
    said = []
    monkeypatch.setattr(
        "vllm_crossspec.drafters.dflash.proposer.logger.warning", lambda text, *values: said.append(text % values)
    )
    spec = engines.ours("dflash", engines.DFLASH) | {"num_speculative_tokens": num_tokens}
    with engines.engine(spec) as llm:
        assert engines.generate(llm, engines.prompts(2), max_tokens=8)
    told = ["drafts in blocks of 4 and was trained on blocks of 8" in line for line in said]
    assert told == ([True] if num_tokens == 3 else [])
