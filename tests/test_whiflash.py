"""Routing in whole engines: plain's text whatever the routes, and caches as if every drafter were always active."""

import functools

import engines
import numpy as np
import pytest
import shadow
from vllm import SamplingParams

pytestmark = pytest.mark.e2e

MAX_TOKENS = 24
SEEDED = {"temperature": 1.0, "seed": 11, "max_tokens": MAX_TOKENS}


def spec(trees=False, third=False, **router):
    """EAGLE-3 and DFlash, shorter than usual, so that there are more rounds; and DART with its n-grams as a third."""
    eagle3 = {"tree": {"depth": 4, "top_k": 3, "num_nodes": 10}} if trees else {"num_speculative_tokens": 4}
    dflash = {"num_speculative_tokens": 7} | ({"tree": {"num_nodes": 12}} if trees else {})
    drafters = {
        "dflash": {"model": str(engines.DFLASH), **dflash},
        "eagle3": {"model": str(engines.EAGLE3), **eagle3},
    }
    if third:
        shape = {"tree": {"num_nodes": 12}, "ngram": str(engines.NGRAM)} if trees else {"tree": engines.CHAIN}
        drafters["dart"] = {"model": str(engines.DART), "num_speculative_tokens": 5, **shape}
    return {"method": "whiflash", "drafters": drafters, "router": router}


def texts(llm):
    prompts = engines.prompts(6)
    return [
        engines.generate(llm, prompts, max_tokens=MAX_TOKENS),
        engines.generate(llm, prompts, **SEEDED),
        [engines.generate(llm, [prompts[0]], max_tokens=MAX_TOKENS)[0]],
    ]


@pytest.fixture(scope="module")
def plain():
    sampling = {name: SEEDED[name] for name in ("temperature", "seed")}
    return [engines.plain(6, MAX_TOKENS), engines.plain(6, MAX_TOKENS, **sampling), engines.plain(1, MAX_TOKENS)]


def routing(llm):
    return llm.collective_rpc("crossspec_routing")[0]


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
def test_mixed_routes_give_plains_text(plain, trees):
    found, figures = {}, {}
    for lazy in (True, False):
        threshold = [1.5, 0.5] if trees else 1.0
        settings = spec(trees, third=trees, policy="entropy", threshold=threshold, lazy=lazy, max_backlog=64)
        # With a prefix cache a drafter catches up when the request ends, too, and so saves passes but no tokens.
        with engines.engine(settings, max_num_batched_tokens=256, enable_prefix_caching=False) as llm:
            found[lazy] = texts(llm)
            figures[lazy] = routing(llm), llm.collective_rpc("crossspec_stats")[0]
    assert found[True] == found[False] == plain
    (lazy, accepted), (eager, accepted_by_eager) = figures[True], figures[False]
    # Laziness changes no draft, and saves most of what the drafters would compute.
    assert accepted == accepted_by_eager
    for name, counts in lazy["drafters"].items():
        assert counts["decisions"] == eager["drafters"][name]["decisions"] > 0
        assert counts["switches"] == eager["drafters"][name]["switches"] > 0
        assert eager["drafters"][name]["missed_tokens"] == 0 < counts["missed_tokens"]
        assert sum(counts["backlog_histogram"]) == counts["switches"]
        assert counts["caught_up_tokens"] < eager["drafters"][name]["caught_up_tokens"]
        assert counts["catch_ups"] < eager["drafters"][name]["catch_ups"]
    assert lazy["waits"] >= lazy["rounds"]
    decisions = sum(counts["decisions"] for counts in lazy["drafters"].values())
    tokens = sum(len(text) for batch in plain for text in batch)
    accepted_tokens = sum(counts["accepted_tokens"] for counts in accepted.values())
    assert decisions >= tokens - accepted_tokens - sum(len(batch) for batch in plain)


def test_a_request_goes_by_the_thresholds_of_its_category(plain):
    """Those of `code` always to EAGLE-3, those of `math` never, the others to either; last all in one batch."""
    by_category = {"code": 0.0, "math": engines.NO_ENTROPY}
    settings = spec(policy="entropy", threshold=1.0, by_category=by_category, entropy_of="sampling")
    counts, before = [], np.zeros(2, dtype=int)
    with engines.engine(settings, max_num_batched_tokens=256) as llm:
        for names in (("code",), ("math",), (None, "code", "math")):
            given = [SamplingParams(**SEEDED, extra_args=_category(name)) for name in (names * 6)[:6]]
            answers = llm.generate(engines.prompts(6), given, use_tqdm=False)
            assert [list(answer.outputs[0].token_ids) for answer in answers] == plain[1]
            now = np.array([routing(llm)["drafters"][name]["decisions"] for name in ("eagle3", "dflash")])
            counts.append((now - before).tolist())
            before = now
    code, math, mixed = counts
    assert code[1] == 0 < code[0] and math[0] == 0 < math[1] and min(mixed) > 0


def _category(name):
    return {} if name is None else {"crossspec_category": name}


LATE = {"policy": "goodput", "wait": False}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_rounds_that_go_by_the_round_before_give_plains_text_and_do_not_wait(plain, is_async):
    settings = spec(trees=True, third=True, **LATE, max_backlog=64)
    with engines.engine(settings, max_num_batched_tokens=256, async_scheduling=is_async) as llm:
        found, figures = texts(llm), routing(llm)
    assert found == plain
    assert all(own["decisions"] > 0 and own["switches"] > 0 for own in figures["drafters"].values())
    # Those in which a request begins do.
    assert 0 < figures["waits"] < figures["rounds"] / 2, figures


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_the_same_routes_get_the_same_drafts_whether_rounds_wait_or_not(name):
    counts = []
    for waits in (True, False):
        with engines.engine(spec(trees=True, policy="goodput", wait=waits), max_num_batched_tokens=256) as llm:
            llm.collective_rpc(functools.partial(shadow.route_to, name=name))
            engines.generate(llm, engines.prompts(6), max_tokens=MAX_TOKENS)
            counts.append(llm.collective_rpc("crossspec_stats")[0])
    assert counts[0] == counts[1] and counts[0][name]["accepted_tokens"] > 0


def test_a_drafter_that_nobody_chooses_costs_the_others_nothing():
    never = {"policy": "entropy", "threshold": engines.NO_ENTROPY}
    with engines.engine(spec(**never, max_backlog=512), enable_prefix_caching=False) as llm:
        engines.generate(llm, engines.prompts(4), max_tokens=12)
        drafters = routing(llm)["drafters"]
        stats = llm.collective_rpc("crossspec_stats")[0]
    assert drafters["eagle3"]["caught_up_tokens"] == drafters["eagle3"]["decisions"] == 0
    assert stats["eagle3"]["drafts"] == 0 < stats["dflash"]["drafts"]


def drive(llm, seed, num_requests=14):
    """Requests of many kinds come at random times; some are aborted, the small cache preempts others."""
    rng, engine = np.random.default_rng(seed), llm.llm_engine
    questions = engines.prompts(8)
    document = " ".join(q.removeprefix("<|im_start|>user\n") for q in questions)[:900]
    waiting = []
    for number in range(num_requests):
        text = questions[int(rng.integers(8))]
        if rng.random() < 0.8:  # a shared beginning, longer than a chunk, or as much of its own
            start = 0 if rng.random() < 0.5 else int(rng.integers(900))
            text = engines.chat(document[start:] + document[:start] + text)
        waiting.append((str(number), text, int(rng.integers(6, 40))))
    running = set()
    while waiting or engine.has_unfinished_requests():
        while waiting and rng.random() < 0.4:
            name, text, length = waiting.pop()
            engine.add_request(
                name, text, SamplingParams(temperature=1.0, seed=int(rng.integers(99)), max_tokens=length)
            )
            running.add(name)
        if running and rng.random() < 0.03:
            gone = sorted(running)[int(rng.integers(len(running)))]
            engine.abort_request([gone])
            running.discard(gone)
        for output in engine.step():
            if output.finished:
                running.discard(output.request_id)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
    "case",
    [
        {"seed": 1, "max_backlog": 512},
        {"seed": 2, "max_backlog": 40, "trees": True, "third": True},
        {"seed": 3, "max_backlog": 512, "is_async": True},
        {"seed": 4, "max_backlog": 40, "trees": True, "third": True, "waits": False},
        {"seed": 5, "max_backlog": 512, "is_async": True, "waits": False},
    ],
    ids=["roomy", "crowded trees", "async", "a round late", "a round late, async"],
)
def test_caches_are_those_of_always_active_drafters(case):
    router = {"policy": "entropy"} if case.get("waits", True) else LATE
    settings = spec(case.get("trees", False), case.get("third", False), **router, max_backlog=case["max_backlog"])
    with _engine(settings, case.get("is_async", False)) as llm:
        llm.collective_rpc(shadow.pad_products)
        llm.collective_rpc(functools.partial(shadow.route_at_random, seed=case["seed"]))
        llm.collective_rpc(shadow.keep_shadows)
        drive(llm, case["seed"])
        compared, differences = llm.collective_rpc(shadow.comparison)[0]
        counts = engines.counts(llm)
        figures = routing(llm)
        switches = sum(d["switches"] for d in figures["drafters"].values())
        preempted = {m.name: m for m in llm.get_metrics()}["vllm:num_preemptions"].value
        llm.collective_rpc(shadow.unpad)
    assert not differences, differences[:5]
    assert compared > 10_000 and switches > 20 and counts.prefix_hits > 0 and preempted > 0
    assert (figures["waits"] >= figures["rounds"]) is case.get("waits", True)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("broken", [shadow.forget_a_catch_up, shadow.never_flush, shadow.settle_too_much])
def test_the_comparison_sees(broken):
    router = LATE if broken is shadow.settle_too_much else {"policy": "entropy"}
    with _engine(spec(**router)) as llm:
        llm.collective_rpc(shadow.pad_products)
        llm.collective_rpc(functools.partial(shadow.route_at_random, seed=4))
        llm.collective_rpc(shadow.keep_shadows)
        llm.collective_rpc(broken)
        drive(llm, 4, num_requests=10)
        _, differences = llm.collective_rpc(shadow.comparison)[0]
        llm.collective_rpc(shadow.unpad)
    assert differences


def _engine(settings, is_async=False):
    small = {"block_size": 32, "num_gpu_blocks_override": 21, "max_num_seqs": 5, "max_num_batched_tokens": 128}
    return engines.engine(settings, async_scheduling=is_async, **small)
