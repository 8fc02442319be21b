"""Drafters without weights in running engines: plain's text, drafts as the loops say, and nobody else's text."""

import functools
from typing import Any

import engines
import pytest
import sabotage
from reference import recorder

from vllm_crossspec.lookup.naive import match_tree_naive, own_matches_naive

pytestmark = pytest.mark.e2e

NODES = 12
SPECS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram", "tree": engines.CHAIN, "num_speculative_tokens": 5},
    "ngram-tree": {"method": "ngram", "tree": {"num_nodes": NODES}},
    "suffix": {"method": "suffix", "tree": {"num_nodes": NODES}},
    "suffix-share": {"method": "suffix", "tree": {"num_nodes": NODES}, "lookup": {"share": True}},
    "suffix-chain": {"method": "suffix", "tree": engines.CHAIN, "lookup": {"share": True}},
}
ROUTED = {
    "method": "whiflash",
    "drafters": {
        "eagle3": {"model": str(engines.EAGLE3), "tree": {"num_nodes": NODES}},
        "dflash": {"model": str(engines.DFLASH), "tree": {"num_nodes": NODES}},
        "suffix": {"tree": {"num_nodes": NODES}, "lookup": {"share": True}},
        "ngram": {"num_speculative_tokens": 4},
    },
    "router": {"policy": "entropy", "threshold": [2.0, 1.5, 0.1]},
}


@functools.cache
def results(name):
    return engines.run_scenarios(SPECS[name])


@pytest.mark.parametrize("name", [name for name in SPECS if name != "plain"])
def test_text_is_plains_and_drafts_are_accepted(name):
    found, plain = results(name), results("plain")
    assert found.tokens == plain.tokens
    (stats,) = found.stats.values()
    assert stats["accepted_tokens"] == found.counts.accepted > 20


def known_prompts():
    """Texts that repeat themselves, and one that does not."""
    return [[5, 6, 7, 8] * 6, [9, 3, 9, 4, 9, 3, 9, 5, 9, 3], list(range(20, 60)), [11]]


@pytest.mark.parametrize("name", ["ngram", "ngram-tree", "suffix"])
def test_drafts_are_what_the_loops_find(name):
    spec = SPECS[name]
    is_suffix, is_chain = name == "suffix", name == "ngram"
    sizes = {"min_match": 1, "max_match": 16} if is_suffix else {"min_match": 2, "max_match": 8}
    num_matches, depth = 1 if is_chain else 16 if is_suffix else 8, 5 if is_chain else 8
    with engines.engine(spec, skip_tokenizer_init=True) as llm:
        llm.collective_rpc(recorder.start)
        traces = recorder.trace(llm, known_prompts(), 48)
    compared = 0
    for trace in traces:
        for length, draft in trace.drafts.items():
            text = trace.tokens[:length]
            matches = own_matches_naive(text, **sizes, num_matches=num_matches, depth=depth)
            if is_chain:
                expected = list(matches[0].continuation) if matches else [0] * depth
            else:
                expected = [prefix[-1] for prefix in match_tree_naive(matches, sizes["max_match"], NODES)]
            assert draft[: len(expected)] == expected and not any(draft[len(expected) :])
            compared += bool(matches)
    assert compared > 15


def draft_nonsense(worker: Any) -> None:
    """Every draft is of token 1."""
    proposer = worker.model_runner.speculator.active

    def wrapper(original: Any) -> Any:
        def propose_step(step: Any) -> Any:
            drafted = original(step)
            drafted.tree.tokens.fill_(1)
            return drafted

        return propose_step

    sabotage._replace(worker, proposer, "propose_step", wrapper)


def test_nonsense_for_drafts_costs_acceptance_alone_and_the_comparison_can_fail():
    prompts = engines.prompts(3)
    with engines.engine(SPECS["suffix"]) as llm:
        wanted = engines.generate(llm, prompts)
        llm.collective_rpc(draft_nonsense)
        before = engines.counts(llm).accepted
        assert engines.generate(llm, prompts) == wanted
        assert engines.counts(llm).accepted - before < 6
        llm.collective_rpc(sabotage.mend)
        llm.collective_rpc(sabotage.accept_everything)
        assert engines.generate(llm, prompts) != wanted


# -- whose text is drafted --------------------------------------------------------------------------------------------


def settle(worker: Any) -> int:
    """Wait for the corpus; tokens in it."""
    corpus = worker.model_runner.speculator.active.corpus
    if corpus is None:
        return 0
    corpus.settle()
    return 0 if corpus.version is None else len(corpus.version.tokens)


def answered_twice(spec: dict[str, Any]) -> tuple[list[int], int]:
    """Accepted tokens of two users who ask the same, one after the other; and tokens that were kept between them."""
    accepted, prompt = [], engines.prompts(1)
    with engines.engine(spec, enable_prefix_caching=False) as llm:
        engines.generate(llm, engines.prompts(3)[2:], max_tokens=8)  # the first to be served
        llm.collective_rpc(settle)
        texts = []
        for _ in range(2):
            before = engines.counts(llm).accepted
            texts.append(engines.generate(llm, prompt, max_tokens=60, ignore_eos=True))
            kept = llm.collective_rpc(settle)[0]
            accepted.append(engines.counts(llm).accepted - before)
        assert texts[0] == texts[1]
    return accepted, kept


def test_nothing_is_shared_unless_the_operator_says_so():
    """The second of two users is drafted for exactly as the first, whatever was answered in between."""
    accepted, kept = answered_twice(SPECS["suffix"])
    assert accepted[0] == accepted[1] and kept == 0


@pytest.mark.parametrize("name", ["suffix-share", "suffix-chain"])
def test_with_sharing_an_answer_that_was_given_before_is_drafted(name):
    accepted, kept = answered_twice(SPECS[name])
    assert accepted[1] > accepted[0] + 10 and accepted[1] > 40 and kept > 100


def test_the_bound_of_the_memory_holds():
    spec = {**SPECS["suffix"], "lookup": {"share": True, "cache_tokens": 128}}
    with engines.engine(spec) as llm:
        for _ in range(3):
            engines.generate(llm, engines.prompts(8), max_tokens=40, ignore_eos=True)
            assert 64 < llm.collective_rpc(settle)[0] <= 128


# -- beside others ----------------------------------------------------------------------------------------------------


def test_four_drafters_of_which_two_have_no_weights():
    """All of them draft, the text is plain's, and those without a cache never miss a token."""
    with engines.engine(ROUTED) as llm:
        prompts = engines.prompts(8)
        plain = results("plain").tokens
        assert engines.generate(llm, prompts) == plain["eight"]
        assert engines.generate(llm, prompts[:3], max_tokens=12, temperature=0.8, top_p=0.95, seed=7) == plain["seeded"]
        stats = llm.collective_rpc("crossspec_stats")[0]
    assert all(stats[name]["drafts"] > 0 for name in ROUTED["drafters"])
    assert stats["suffix"]["accepted_tokens"] > 0


def test_async_scheduling():
    with engines.async_scheduling_on_cpu(), engines.engine(SPECS["suffix-share"], async_scheduling=True) as llm:
        assert engines.generate(llm, engines.prompts(8)) == results("plain").tokens["eight"]


def test_beside_vllms_own_ngram():
    """The same texts and lengths of matches: plain's text from both, and no fewer tokens accepted a draft."""
    own = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 8}
    found = {}
    texts = [{"prompt_token_ids": prompt} for prompt in known_prompts()]
    for name, spec in {"plain": None, "vLLM": own, "ours": SPECS["ngram"]}.items():
        with engines.engine(spec, skip_tokenizer_init=True) as llm:
            tokens = engines.generate(llm, texts, max_tokens=64, ignore_eos=True)
            counts = engines.counts(llm)
            found[name] = tokens, counts.accepted, sum(map(len, tokens)) - counts.accepted
    assert found["ours"][0] == found["vLLM"][0] == found["plain"][0]
    assert found["ours"][1] >= 0.9 * found["vLLM"][1] > 20
