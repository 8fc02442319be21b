"""Drafters without weights in running engines: plain's text, drafts as the loops say, and nobody else's text."""

import copy
import inspect
import re
import time
from types import SimpleNamespace
from typing import Any, NamedTuple

import engines
import pytest
import sabotage
import torch
from engines import ENGINES
from reference import recorder
from vllm.config import SpeculativeConfig

from vllm_crossspec.drafters.lookup.corpus import Version
from vllm_crossspec.drafters.lookup.kernels import Matches
from vllm_crossspec.drafters.lookup.naive import match_tree_naive, own_matches_naive

pytestmark = pytest.mark.e2e

NODES = 12
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


LOOKUPS = ["ngram", "ngram-tree", "suffix", "suffix-share", "suffix-chain"]


def results(name):
    """All scenarios, and :func:`follow`."""
    if name != "suffix":
        return engines.results(name, follow)
    found = engines.results(name, follow_and_break)
    return found._replace(more=found.more[0])


@pytest.mark.nightly(keep=5)
@pytest.mark.parametrize("name", LOOKUPS)
def test_text_is_plains_and_drafts_are_accepted(name):
    found, plain = results(name), engines.results("plain")
    assert found.tokens == plain.tokens
    (stats,) = found.stats.values()
    assert stats["accepted_tokens"] == found.counts.accepted > 20


KNOWN = [[5, 6, 7, 8] * 6, [9, 3, 9, 4, 9, 3, 9, 5, 9, 3], list(range(20, 60)), [11]]
"""Texts that repeat themselves, and one that does not."""


class Followed(NamedTuple):
    """What an engine answered to the known texts, round by round, and how many drafts it accepted."""

    traces: list[recorder.Trace]
    accepted: int


def follow(llm: Any) -> Followed:
    llm.collective_rpc(recorder.start)
    before = engines.counts(llm).accepted
    return Followed(recorder.trace(llm, KNOWN, 64), engines.counts(llm).accepted - before)


def follow_and_break(llm: Any) -> tuple[Followed, list[tuple[list[list[int]], float]]]:
    """Also texts and accepted tokens a draft of the whole engine, with nonsense for drafts, and without a check."""
    breaks = (sabotage.mend, draft_nonsense, sabotage.accept_everything)
    prompts = engines.prompts(3)
    return follow(llm), [engines.run_broken(llm, how, lambda llm: engines.generate(llm, prompts)) for how in breaks]


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


@pytest.mark.parametrize("name", ["ngram", "ngram-tree", "suffix"])
def test_drafts_are_what_the_loops_find(name):
    is_suffix, is_chain = name == "suffix", name == "ngram"
    sizes = {"min_match": 1, "max_match": 16} if is_suffix else {"min_match": 2, "max_match": 8}
    num_matches, depth = 1 if is_chain else 16 if is_suffix else 8, 5 if is_chain else 8
    compared = 0
    for trace in results(name).more.traces:
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


def test_nonsense_for_drafts_costs_acceptance_alone_and_the_comparison_can_fail():
    (wanted, _), (found, accepted), (other, _) = engines.results("suffix", follow_and_break).more[1]
    assert found == wanted != other
    assert accepted < 0.06


# -- whose text is drafted --------------------------------------------------------------------------------------------


def settle(worker: Any) -> int:
    """Wait for the corpus; tokens in it."""
    corpus = worker.model_runner.speculator.active.corpus
    if corpus is None:
        return 0
    while corpus._waiting.unfinished_tasks or corpus._new:
        time.sleep(0.001)
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
    accepted, kept = answered_twice(ENGINES["suffix"])
    assert accepted[0] == accepted[1] and kept == 0


@pytest.mark.parametrize("name", ["suffix-share", "suffix-chain"])
def test_with_sharing_an_answer_that_was_given_before_is_drafted(name):
    accepted, kept = answered_twice(ENGINES[name])
    assert accepted[1] > accepted[0] + 10 and accepted[1] > 40 and kept > 100


def test_the_bound_of_the_memory_holds():
    spec = {**ENGINES["suffix"], "lookup": {"share": True, "cache_tokens": 128}}
    with engines.engine(spec) as llm:
        for _ in range(3):
            engines.generate(llm, engines.prompts(8), max_tokens=40, ignore_eos=True)
            assert 64 < llm.collective_rpc(settle)[0] <= 128


# -- beside others ----------------------------------------------------------------------------------------------------


def test_four_drafters_of_which_two_have_no_weights():
    """All of them draft, the text is plain's, and those without a cache never miss a token."""
    plain = engines.results("plain").tokens
    with engines.engine(ROUTED) as llm:
        prompts = engines.prompts(8)
        assert engines.generate(llm, prompts) == plain["eight"]
        assert engines.generate(llm, prompts[:3], max_tokens=12, **engines.SEEDED) == plain["seeded"]
        stats = llm.collective_rpc("crossspec_stats")[0]
    assert all(stats[name]["drafts"] > 0 for name in ROUTED["drafters"])
    assert stats["suffix"]["accepted_tokens"] > 0


def test_async_scheduling():
    plain = engines.plain(8)
    with engines.engine(ENGINES["suffix-share"], async_scheduling=True) as llm:
        assert engines.generate(llm, engines.prompts(8)) == plain


def test_beside_vllms_own_ngram():
    """The same texts and lengths of matches: plain's text from both, and no fewer tokens accepted a draft."""
    own = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 8}
    texts, found = [{"prompt_token_ids": prompt} for prompt in KNOWN], {}
    for name, spec in {"plain": None, "vLLM": own}.items():
        with engines.engine(spec, skip_tokenizer_init=True) as llm:
            found[name] = engines.generate(llm, texts, max_tokens=64, ignore_eos=True), engines.counts(llm).accepted
    traces, accepted = results("ngram").more
    assert [trace.tokens[trace.num_prompt_tokens :] for trace in traces] == found["vLLM"][0] == found["plain"][0]
    assert accepted >= 0.9 * found["vLLM"][1] > 20


# -- memory of a GPU --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "is_dense"), [("ngram", True), ("suffix", True), ("routed", True), ("eagle3", False)])
def test_texts_that_are_searched_are_in_the_devices_memory(spec, is_dense, monkeypatch):
    """Not in pinned host memory, where a search of every text would read it over the bus in every round."""
    from vllm.v1.worker.gpu import model_runner

    from vllm_crossspec.config.parse import parse
    from vllm_crossspec.runner import runner

    given, others = {**ENGINES, "routed": ROUTED, "eagle3": {"method": "eagle3", **ROUTED["drafters"]["eagle3"]}}, []
    speculative = SpeculativeConfig.__new__(SpeculativeConfig)  # of a method that carries our drafters
    speculative.method = "dflash"

    class Native:
        """vLLM's runner, as far as it asks where texts are to be."""

        def __init__(self, vllm_config, device):
            self.is_dense = vllm_config.speculative_config.use_ngram()
            others.extend([copy.copy(speculative).use_ngram(), speculative.use_ngram()])
            raise InterruptedError(self.is_dense)

    monkeypatch.setattr(runner, "settings_of", lambda config: parse(given[spec], ()))
    with pytest.raises(InterruptedError, match=str(is_dense)):
        type("Runner", (runner.MatchRunner, Native), {})(SimpleNamespace(speculative_config=speculative), None)
    assert others == [False, False] and "use_ngram" not in vars(speculative)
    made = inspect.getsource(model_runner.GPUModelRunner.__init__)
    asked = re.search(r"use_dense_all_token_ids = \((.*?)\n        \)", made, re.DOTALL)
    assert "self.speculative_config.use_ngram()" in asked[1] and made.count("use_ngram()") == 1


class OnDevice:
    """A tensor of a GPU, as far as its memory goes."""

    is_cuda, device = True, torch.device("cuda", 1)

    def __init__(self):
        self.used_by = []

    def record_stream(self, stream):
        self.used_by.append(stream)


def test_a_version_is_kept_for_the_stream_that_searches_it(monkeypatch):
    """The corpus' thread allocates it on another stream, and drops it while launched searches have yet to run."""
    from vllm_crossspec.drafters.lookup import proposer as lookup

    launched = []
    monkeypatch.setattr(lookup, "own_matches", lambda *texts, **options: None)
    monkeypatch.setattr(
        lookup, "corpus_matches", lambda texts, tensors, **options: launched.append([t.used_by[:] for t in tensors])
    )
    of_slots = SimpleNamespace(gpu=torch.zeros(2, 9))
    proposer = SimpleNamespace(
        num_matches=1,
        min_match=2,
        max_match=8,
        corpus=SimpleNamespace(version=Version(1, OnDevice(), OnDevice()), context=8),
        matches=Matches(torch.zeros(2, 2, 3), torch.zeros(2, 2), torch.zeros(2, 2)),
        req_states=SimpleNamespace(num_computed_tokens=of_slots, all_token_ids=of_slots),
    )
    step = SimpleNamespace(batch=SimpleNamespace(num_reqs=2, idx_mapping=torch.zeros(2)))
    for stream in ("decoding", "another"):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, stream=stream: (stream, device))
        lookup.LookupProposer._search(proposer, step)
    first, second = ("decoding", OnDevice.device), ("another", OnDevice.device)
    assert launched == [[[first], [first]], [[first, second], [first, second]]]
