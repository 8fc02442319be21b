"""Several forms of draft from one drafter, and none at all, under a router: one set of weights, one cache."""

import functools
import json
from typing import Any, NamedTuple

import engines
import pytest

from vllm_crossspec.config import parse as config_parsing
from vllm_crossspec.load.costs import RoundCosts, as_json
from vllm_crossspec.routing.speculator import RoutedSpeculator
from vllm_crossspec.speculator.single import SingleSpeculator

NODES = 12
DRAFTERS: dict[str, Any] = {
    "eagle3": {"model": str(engines.EAGLE3), "tree": {"num_nodes": NODES, "depth": 5, "top_k": 4}},
    "chain": {"of": "eagle3", "num_speculative_tokens": 3},
    "narrow": {"of": "eagle3", "tree": {"num_nodes": 6, "depth": 3, "top_k": 3}},
    "dflash": {"model": str(engines.DFLASH), "tree": {"num_nodes": NODES}},
    "block": {"of": "dflash", "num_speculative_tokens": 5},
    "ngram": {"num_speculative_tokens": 4},
    "plain": {"type": "nothing"},
}
WIDTHS = {"eagle3": NODES, "chain": 3, "narrow": 6, "dflash": NODES, "block": 5, "ngram": 4, "plain": 0}


def spec(drafters: dict[str, Any], **router: Any) -> dict[str, Any]:
    return {"method": "whiflash", "drafters": drafters, "router": router}


def parsed(drafters: dict[str, Any]) -> Any:
    return config_parsing.parse(spec(drafters, policy="fixed", drafter=next(iter(drafters))), ())


def test_a_form_has_its_owners_settings_and_its_own():
    owner = {"type": "eagle3", "model": "m", "dtype": "bfloat16", "tree": {"num_nodes": 9}}
    config = parsed({"chain": {"of": "e", "num_speculative_tokens": 3}, "e": owner})
    chain = config.drafters["chain"]
    assert (chain.kind, chain.model, chain.dtype, chain.of) == ("eagle3", "m", "bfloat16", "e")
    assert chain.tree.is_chain and not config.drafters["e"].tree.is_chain
    assert config.owners == ("e",) and config.owner_of("chain") == config.owner_of("e") == "e"


def test_by_policy_fixed_only_one_drafter_is_left_with_its_owners_weights():
    config = parsed({"chain": {"of": "eagle3", "num_speculative_tokens": 3}, "eagle3": DRAFTERS["eagle3"], "ngram": {}})
    alone = config.without_idle()
    assert list(alone.drafters) == [alone.active] == ["chain"] and not alone.is_routed
    assert alone.drafters["chain"] == config.drafters["chain"].model_copy(update={"of": None})
    assert alone.path_of("chain") == "speculative_config.drafters.chain."
    several = config_parsing.parse(spec({"eagle3": DRAFTERS["eagle3"], "ngram": {}}), ())
    assert several.without_idle() == several


@pytest.mark.parametrize(
    ("drafters", "message"),
    [
        ({"a": {"of": "eagl3"}, "eagle3": {"model": "m"}}, "drafters.a.of must name another.*did you mean 'eagle3'"),
        ({"eagle3": {"of": "eagle3", "model": "m"}}, "drafters.eagle3.of must name another"),
        ({"a": {"of": "b"}, "b": {"of": "eagle3"}, "eagle3": {"model": "m"}}, "a.of: b uses .* of eagle3 itself"),
        ({"a": {"of": "eagle3", "dtype": "bfloat16"}, "eagle3": {"model": "m"}}, "a.dtype is the same for all"),
        ({"a": {"of": "ngram"}, "ngram": {}}, "a.of: a ngram drafter has no weights to share"),
        ({"a": {"of": "confu"}, "confu": {"model": "m"}}, "a.of: a confu drafter contemplates for one form"),
        ({"ngram": {"model": "m"}}, "ngram.model: a ngram drafter has no weights"),
        ({"ngram": {"prompt_lookup_max": 3}}, "belongs to vLLM's own 'ngram'.*\"max_match\": 3"),
        ({"ngram": {"lookup": {"share": True}}}, "lookup.share: a ngram drafter looks into the request's own text"),
        ({"suffix": {"lookup": {"min_match": 9, "max_match": 4}}}, "lookup.min_match is 9, and at most 4"),
        ({"suffix": {"lookup": {"max_mtch": 4}}}, "unknown key 'drafters.suffix.lookup.max_mtch'.*max_match"),
        ({"suffix": {"tree": {"top_k": 4}}}, "tree.top_k: a matches tree has as many branches as were found"),
        ({"suffix": {"tree": {"depth": 4}}}, "tree.depth: a matches tree is as deep as num_speculative_tokens"),
        ({"eagle3": {"model": "m", "tree": {"type": "matches"}}}, "tree.type 'matches' does not suit a eagle3"),
        ({"eagle3": {"model": "m", "lookup": {}}}, "eagle3.lookup: a eagle3 drafter looks nothing up"),
        ({"plain": {"type": "nothing", "lookup": {}}}, "plain.lookup: a nothing drafter looks nothing up"),
    ],
)
def test_what_is_refused(drafters, message):
    with pytest.raises(ValueError, match=message):
        config_parsing.parse(spec(drafters), ("prompt_lookup_max",))


def test_nothing_alone_is_refused():
    with pytest.raises(ValueError, match="to draft nothing at all leave out --speculative-config"):
        config_parsing.parse({"method": "nothing"}, ())


# -- in engines -------------------------------------------------------------------------------------------------------


def everything(llm: Any) -> list[Any]:
    prompts = engines.prompts(6)
    return [
        engines.generate(llm, prompts, max_tokens=24),
        engines.generate(llm, prompts[:1], max_tokens=24),
        engines.generate(llm, prompts[:3], max_tokens=12, **engines.SEEDED),
    ]


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    return [engines.plain(6, 24), engines.plain(1, 24), engines.plain(3, 12, **engines.SEEDED)]


def take_turns(worker: Any) -> None:
    """Route request r of a round to drafter (round + r) mod N, and keep the rows that each brought to the target."""
    host: RoutedSpeculator = worker.model_runner.speculator
    worker.turn, worker.widths, decide, runner = 0, [], host.router.decide, worker.model_runner
    names = host.order
    worker.drafted = {}

    def decided(states: Any, rows: Any, idx_mapping: Any, num_sampled: Any, out: Any, carries_out: bool) -> None:
        decide(states, rows, idx_mapping, num_sampled, out, carries_out)
        for row in range(idx_mapping.shape[0]):
            if int(out[row]) >= 0:
                out[row] = (worker.turn + row) % len(names)
                worker.drafted[int(idx_mapping[row])] = names[int(out[row])]
        worker.turn += 1

    prepare = runner.prepare_inputs

    def prepared(*arguments: Any, **options: Any) -> Any:
        batch = prepare(*arguments, **options)
        if batch.num_draft_tokens_per_req is not None:
            for row in range(batch.num_reqs):
                name = worker.drafted.get(int(batch.idx_mapping_np[row]))
                worker.widths.append((name, int(batch.num_draft_tokens_per_req[row])))
        return batch

    host.router.decide, runner.prepare_inputs = decided, prepared


@pytest.mark.e2e
def test_all_forms_by_turns_are_plains_text_and_no_row_is_verified_for_nothing(plain):
    with engines.engine(spec(DRAFTERS, policy="goodput", explore=False)) as llm:
        llm.collective_rpc(take_turns)
        assert everything(llm) == plain
        stats = llm.collective_rpc("crossspec_stats")[0]
        widths = llm.collective_rpc(lambda worker: worker.widths)[0]
    assert all(width <= WIDTHS[name] for name, width in widths if name)
    assert {name for name, width in widths if name and width == WIDTHS[name]} == set(WIDTHS)
    assert stats["plain"]["accepted_tokens"] == 0
    for name in ("eagle3", "chain", "narrow", "dflash", "block"):
        assert stats[name]["accepted_tokens"] > 5, name


@pytest.mark.nightly
@pytest.mark.e2e
def test_a_form_drafts_what_a_drafter_of_its_own_would(plain):
    """Beside its owner or alone, with one cache or its own: the same drafts, so the same acceptance."""
    accepted = {}
    for name in ("chain", "block"):
        owner = DRAFTERS[name]["of"]
        the_last = {"policy": "entropy", "threshold": engines.NO_ENTROPY}
        shared = spec({owner: DRAFTERS[owner], name: DRAFTERS[name]}, **the_last)
        own = {"type": owner, "model": DRAFTERS[owner]["model"]} | {"num_speculative_tokens": WIDTHS[name]}
        alone = spec({owner: DRAFTERS[owner], name: own}, **the_last)
        drafted = [fixed(name).stats[name]]
        for spelled in (shared, alone):
            with engines.engine(spelled) as llm:
                assert everything(llm) == plain
                drafted.append(llm.collective_rpc("crossspec_stats")[0][name])
        accepted[name] = [(stats["accepted_tokens"], stats["drafts"]) for stats in drafted]
    assert all(len(set(found)) == 1 and found[0][0] > 20 for found in accepted.values())


class Fixed(NamedTuple):
    """What the engine of one fixed arm did, and what it holds."""

    texts: list[Any]
    stats: dict[str, Any]
    planned: set[int]
    proposers: list[str]
    speculator: type
    num_layers: int


@functools.cache
def fixed(name: str) -> Fixed:
    with engines.engine(spec(DRAFTERS, policy="fixed", drafter=name)) as llm:
        llm.collective_rpc(keep_planned)
        texts, stats = everything(llm), llm.collective_rpc("crossspec_stats")[0]
        host = llm.collective_rpc(lambda worker: worker.model_runner.speculator)[0]
        planned = llm.collective_rpc(lambda worker: worker.planned)[0]
    return Fixed(texts, stats, planned, list(host.proposers), type(host), len(host.draft_attn_layer_names))


def keep_planned(worker: Any) -> None:
    """Keep the draft tokens that the scheduler plans of each request, before any is cut."""
    runner, worker.planned = worker.model_runner, set()
    execute = runner.execute_model

    def executed(scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
        worker.planned |= {len(drafts) for drafts in scheduler_output.scheduled_spec_decode_tokens.values()}
        return execute(scheduler_output, *arguments, **options)

    runner.execute_model = executed


@pytest.mark.e2e
@pytest.mark.parametrize(("name", "layers"), [("chain", 1), ("block", None), ("narrow", 1), ("ngram", 0), ("plain", 0)])
def test_a_fixed_arm_is_a_method_of_its_own(name, layers, plain):
    """No other drafter is loaded, has a cache or is told anything, and no row is planned beyond what it drafts."""
    arm = fixed(name)
    assert arm.texts == plain
    assert list(arm.stats) == arm.proposers == [name] and arm.speculator is SingleSpeculator
    assert layers is None or arm.num_layers == layers
    assert arm.planned == ({WIDTHS[name]} if WIDTHS[name] else set())


@pytest.mark.e2e
def test_goodput_by_experience_is_plains_text_and_follows_what_drafts_are_worth(plain):
    """No costs are measured here, so that most tokens win: those of the large tree, not those of the others.

    Nothing is learned from requests that want no drafts.
    """
    from vllm import SamplingParams

    def has_learned() -> bool:
        known = llm.collective_rpc(lambda worker: worker.model_runner.speculator.router.experience.known)[0]
        return bool(known.all_requests.any())

    with engines.engine(spec(DRAFTERS, policy="goodput")) as llm:
        off = SamplingParams(temperature=0.0, max_tokens=24, extra_args={"crossspec": "off"})
        llm.generate(engines.prompts(4), off, use_tqdm=False)
        assert not has_learned()
        for _ in range(3):
            assert everything(llm) == plain
        assert has_learned()
        stats = llm.collective_rpc("crossspec_stats")[0]
    drafts = {name: found["drafts"] for name, found in stats.items()}
    assert max(drafts, key=drafts.__getitem__) in ("eagle3", "dflash")
    assert drafts["eagle3"] + drafts["dflash"] > 0.6 * sum(drafts.values())


@pytest.mark.e2e
def test_goodput_goes_by_costs_that_are_measured_at_start_up(monkeypatch, plain):
    monkeypatch.delenv("CROSSSPEC_FIXED_WIDTHS")
    drafters = {name: DRAFTERS[name] for name in ("eagle3", "chain", "plain")}
    with engines.engine(spec(drafters, policy="goodput"), max_num_seqs=4) as llm:
        costs = llm.collective_rpc(lambda worker: worker.model_runner.speculator.router.costs)[0]
        prompts = engines.prompts(4)
        assert engines.generate(llm, prompts, max_tokens=24) == [text[:24] for text in plain[0][:4]]
        for prompt in prompts[:3]:  # the first two rounds of a request say nothing
            engines.generate(llm, [prompt], max_tokens=64)
        timed = llm.collective_rpc(lambda worker: worker.model_runner.speculator.observer.num_timed)[0]
        known = llm.collective_rpc(lambda worker: worker.model_runner.speculator.router.experience.known)[0]
        tree, chain, nothing = known.arrivals[0].tolist()
    if known.arrivals.device.type == "cpu":  # what each has missed counts, and spreads over many tokens
        assert 0 < tree == chain < 0.1 and nothing == 0
    assert timed > 8
    of = {name: costs.round_seconds(0)[number] for number, name in enumerate(("eagle3", "chain", "plain"))}
    assert of["eagle3"] > of["chain"] > of["plain"] > 0
    assert costs.draft[0][2] < 0.2 * costs.draft[0][1]
    assert costs.owners == (0, 0, 2)


@pytest.mark.e2e
def test_goodput_goes_by_costs_of_a_file_and_by_no_others(tmp_path, monkeypatch, plain):
    """By these only the chain pays, whatever is measured here; what a file names beside is not looked at."""
    monkeypatch.delenv("CROSSSPEC_FIXED_WIDTHS")
    given = RoundCosts((1, 4), *(((9.0, 0.1, 5.0, 1.0),) * 2,) * 2, ((0.0,) * 4,) * 2, owners=(0, 0, 2, 3))
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(as_json(given, ("eagle3", "chain", "other", "plain"))))
    drafters = {name: DRAFTERS[name] for name in ("eagle3", "chain", "plain")}
    router = {"policy": "goodput", "costs": str(file), "explore": False}
    with engines.engine(spec(drafters, **router), max_num_seqs=4) as llm:
        assert engines.generate(llm, engines.prompts(4), max_tokens=24) == [text[:24] for text in plain[0][:4]]
        found = llm.collective_rpc("crossspec_round_costs")[0]
        drafts = {name: own["drafts"] for name, own in llm.collective_rpc("crossspec_stats")[0].items()}
    assert found["draft"] == [[9.0, 0.1, 1.0]] * 2 and found["owners"] == ["eagle3", "eagle3", "plain"]
    assert drafts["chain"] > 0 and drafts["eagle3"] == drafts["plain"] == 0
