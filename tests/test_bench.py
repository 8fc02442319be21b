"""`crossspec bench`: counting and timing, whose turn it is, the closed loop, data sets, reports; engines at the end."""

import csv
import json
import re
import xml.dom.minidom
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from commands import crossspec as run_command
from played import GENERATE, spec_file

import vllm_crossspec
from vllm_crossspec.cli import bench, report, rows, runner
from vllm_crossspec.cli.bench import parse_engine_args
from vllm_crossspec.cli.prompts import read_prompts
from vllm_crossspec.cli.runner import Job, Measurement, Pass, Prompt, schedule
from vllm_crossspec.jobs import client, offline
from vllm_crossspec.platform import platform

POCKET = Path(vllm_crossspec.__file__).parent / "pocket"


# ---- counting


def test_rows_count_what_happened():
    def generation(tokens, calls, histogram):
        return {"token_ids": tokens, "num_target_calls": calls, "accepted_histogram": histogram}

    plain = rows.Run(
        method="plain",
        environment={},
        groups={
            "chat": {"seconds": 2.0, "generations": [generation([1, 2, 3], 3, []), generation([4], 1, [])]},
            "code": {"seconds": 1.0, "generations": [generation([7, 8], 2, [])]},
        },
    )
    drafted = rows.Run(
        method="eagle3",
        environment={},
        groups={
            "chat": {"seconds": 1.0, "generations": [generation([1, 2, 3], 3, [1, 0, 1]), generation([4], 1, [])]},
            "code": {"seconds": 0.5, "generations": [generation([7, 9], 2, [0, 1, 0])]},
        },
    )
    for name, count in (("chat", 14), ("code", 7)):
        drafted.groups[name]["num_verified_tokens"] = count
    found = {(row.method, row.category): row for row in rows.rows([plain, drafted])}
    assert [*found] == [(m, c) for m in ("plain", "eagle3") for c in ("chat", "code", "all")]
    everything = found["eagle3", "all"]
    assert (everything.num_prompts, everything.num_tokens, everything.num_target_calls) == (3, 6, 6)
    assert everything.accepted_per_position == [2, 1]
    assert everything.acceptance_length == 1 + 3 / 3
    assert everything.num_rounds == 3
    assert everything.num_verified_tokens == 21 and found["eagle3", "code"].num_verified_tokens == 7
    assert found["plain", "all"].num_verified_tokens is None  # that engine did not say
    assert found["eagle3", "chat"].acceptance_length == 1 + 2 / 2
    assert [found["eagle3", c].identical_to_plain for c in ("chat", "code", "all")] == [True, False, False]
    assert found["plain", "all"].acceptance_length == 1.0 and found["plain", "all"].accepted_per_position == []
    assert found["plain", "all"].seconds == 3.0


def test_rounds_without_drafts_count_in_all_that_is_said_of_rounds():
    """14 of 76 rounds had drafts, and 57 tokens were accepted: bench once called that an acceptance length of 5."""
    histogram = [0, 0, 0, 2, 9, 3]
    one = {"token_ids": [7] * 134, "num_target_calls": 77, "accepted_histogram": histogram, "num_draft_tokens": 70}
    run = rows.Run(method="m", environment={}, groups={"chat": {"seconds": 1.0, "generations": [one]}})
    row = rows.rows([run])[-1]
    assert (row.num_rounds, row.num_drafted_rounds) == (76, 14)
    assert row.acceptance_length == 1 + 57 / 76 == row.tokens_per_round
    assert sum(row.accepted_per_position) / row.num_rounds == pytest.approx(row.acceptance_length - 1)
    assert report.positions(row).split()[0] == f"{100 * 14 / 76:.0f}"
    cells = {name: cell(row) for name, cell in report.COUNTS}
    assert (cells["rounds"], cells["rounds with drafts"], cells["acceptance length"]) == ("76", "14", "1.75")


@pytest.mark.parametrize(
    ("stats", "num_rows"),
    [
        (None, 76 + 70),  # vLLM's own drafter: what its scheduler planned
        ({"m": {"drafts": 14, "draft_tokens": 60}}, 76 + 60),
        ({"m": {"drafts": 0, "draft_tokens": 0}}, 76),
    ],
)
def test_verified_tokens_are_the_rows_of_all_rounds(monkeypatch, stats, num_rows):
    llm = mock.MagicMock()
    llm.collective_rpc.return_value = [stats]
    monkeypatch.setattr(offline, "settings_of", lambda config: None)
    histogram = [0, 0, 0, 2, 9, 3] if stats is None or stats["m"]["drafts"] else []
    done = client.Generation([7] * 134, "", 77, histogram, 70, 0.0, [])
    assert offline._verified_tokens(llm, [done], None if stats is None else 0) == num_rows


def test_requests_name_a_category_that_the_router_knows(monkeypatch):
    """Of each category in its turn; a warm-up, which mixes them, names none."""
    asked = []

    def answer(llm, conversations, sampling, *more):
        asked.append((sampling.get("extra_args"), sampling["temperature"]))
        return []

    router = SimpleNamespace(by_category={"math": (0.5,)})
    llm = mock.MagicMock()
    llm.collective_rpc.return_value = [None]
    monkeypatch.setattr(offline, "settings_of", lambda config: SimpleNamespace(router=router))
    monkeypatch.setattr(offline, "answer", answer)
    monkeypatch.setattr(offline, "Conversation", mock.MagicMock())
    groups = [{"category": name, "prompts": [{"where": "", "turns": ["a"]}]} for name in ("chat", "math")]
    job = {"groups": groups, "chat": False, "sampling": {"temperature": 0.0, "max_tokens": 4}}
    offline.Measured(llm, job, lambda *_, **__: None).follow({"batch_size": 1, "warm_up": True})
    assert asked == [(None, 0.0), (None, 0.0), ({"crossspec_category": "math"}, 0.0)]


def test_identity_is_unknown_without_plain():
    alone = rows.Run(method="eagle3", environment={}, groups={"chat": {"seconds": 0.0, "generations": []}})
    assert {row.identical_to_plain for row in rows.rows([alone])} == {None}


def test_the_interval_of_an_acceptance_length_is_over_texts():
    """Of 400 texts it is as wide as 1.96 deviations of their mean; texts that are alike have none, one says nothing."""
    accepted = np.random.default_rng(3).integers(0, 9, 400)
    low, high = rows.acceptance_interval([[0] * n + [4] for n in accepted], [4] * 400)
    mean = 1 + accepted.mean()
    assert [mean - low, high - mean] == pytest.approx([1.96 * accepted.std() / 20] * 2, rel=0.15)
    assert rows.acceptance_interval([[1, 1], [2, 2], []], [2, 4, 0]) == [1.5, 1.5]
    assert rows.acceptance_interval([[1, 1], []], [2, 0]) is None
    assert rows.acceptance_interval([[], []], [3, 3]) is None
    assert rows.acceptance_interval([[0, 1], [0, 1]], [2, 2]) == [1.5, 1.5]  # a round of each had no draft


def test_the_interval_of_a_speedup_is_over_texts():
    """Of 300 texts as wide as 1.96 deviations of a ratio of sums; alike ones have none, batches and one text no."""
    rng = np.random.default_rng(5)
    seconds = rng.uniform(0.1, 0.9, 300)

    def run(method, latencies, batch_size=1):
        made = [
            {
                "token_ids": [1] * 4,
                "num_target_calls": 2,
                "accepted_histogram": [1],
                "ttft": 0.1,
                "times": [7.1, 7.0 + s],
            }
            for s in latencies
        ]
        group = {"seconds": float(sum(latencies)), "generations": made}
        return rows.Run(method=method, environment={}, groups={"math": group}, batch_size=batch_size)

    def interval(latencies, plain, **more):
        given = [run("plain", plain, **more), run("eagle3", latencies, **more)]
        return next(row for row in rows.rows(given) if row.method == "eagle3").speedup_interval

    low, high = interval(seconds, np.full(300, 1.0))
    mean = 1 / seconds.mean()
    width = 1.96 * seconds.std() / np.sqrt(300) * mean**2
    assert [mean - low, high - mean] == pytest.approx([width] * 2, rel=0.15)
    assert interval(seconds / 2, seconds) == pytest.approx([2.0, 2.0])  # which prompt takes long does not matter
    assert interval([0.5], [1.0]) is None
    assert interval([0.5, 0.5], [1.0, 1.0], batch_size=2) is None


def test_positions_from_histograms():
    assert rows.accepted_per_position([[4, 3, 2, 1], [], [0, 0, 0, 5]]) == [11, 8, 6]
    assert rows.accepted_per_position([]) == []


# ---- times


def timed(*times, ttft=0.5):
    return {"ttft": ttft, "times": list(times)}


def run_of(method, seconds, timings=(), repeat=0, num_tokens=10, **group):
    """All tokens of a run are of its first generation, but for one of each other."""
    counts = [num_tokens - max(len(timings) - 1, 0), *[1] * max(len(timings) - 1, 0)]
    generations = [{"token_ids": [7] * n, "num_target_calls": 2, "accepted_histogram": []} for n in counts]
    generations = [one | timing for one, timing in zip(generations, timings or [{}], strict=True)]
    content = {"seconds": seconds, "generations": generations, **group}
    return rows.Run(method=method, environment={}, groups={"chat": content}, batch_size=4, repeat=repeat)


def row_of(runs, method, **options):
    return next(row for row in rows.rows(runs, **options) if (row.method, row.category) == (method, "all"))


def test_percentiles_are_those_of_the_requests():
    """Four outputs with 9 tokens after the first, 0.1, 0.2 and 0.3 s apart; and a request of one token."""
    run = run_of("plain", 2.0, [timed(5.0, 5.1, 5.3, 5.6, ttft=0.2), timed(9.0, ttft=0.4)], num_tokens=11)
    row = row_of([run], "plain")
    assert row.ttft == pytest.approx({"p50": 0.3, "p90": 0.38, "p99": 0.398})
    assert row.itl == pytest.approx({"p50": 0.2, "p90": 0.28, "p99": 0.298})
    assert row.tpot == pytest.approx(dict.fromkeys(("p50", "p90", "p99"), 0.6 / 9))
    assert row.tokens_per_second == 11 / 2 and row.tokens_per_call == 11 / 4 and row.tokens_per_round == 9 / 2
    assert rows.percentiles([]) is None


def test_times_are_of_all_repeats():
    runs = [run_of("plain", 1.0, [timed(0.0, gap, ttft=gap)], repeat=i) for i, gap in enumerate((1.0, 2.0, 6.0))]
    row = row_of(runs, "plain")
    assert row.seconds_by_repeat == [1.0, 1.0, 1.0]
    assert row.repeats == 3 and row.ttft["p50"] == row.itl["p50"] == 2.0 and row.itl["p99"] > 5.9
    assert row.num_tokens == 10  # of one


def test_a_speedup_is_of_the_same_repeat():
    """Plain takes 4, 2 and 1 s beside 2, 2 and 2: the ratios are 2, 1 and 0.5, whatever the medians say."""
    plain = [run_of("plain", seconds, repeat=i) for i, seconds in enumerate((4.0, 2.0, 1.0))]
    mine = [run_of("mine", 2.0, repeat=i) for i in range(3)]
    row = row_of([*plain, *mine], "mine")
    assert (row.speedup, row.speedup_range) == (1.0, [0.5, 2.0])
    assert (row.tokens_per_second, row.tokens_per_second_range) == (5.0, [5.0, 5.0])
    assert row_of([*plain, *mine], "plain").speedup == 1.0
    assert row_of([*plain[:1], *mine], "mine").speedup == 2.0  # of the one repeat that plain finished
    assert row_of(mine, "mine").speedup is None


def test_one_text_of_one_repeat_is_enough_not_to_be_identical():
    plain, mine = ([run_of(name, 1.0, repeat=i) for i in range(2)] for name in ("plain", "mine"))
    assert row_of([*plain, *mine], "mine").identical_to_plain is True
    mine[1].groups["chat"]["generations"][0]["token_ids"][3] = 8
    assert row_of([*plain, *mine], "mine").identical_to_plain is False


def test_shares_of_rounds_and_routes():
    run = run_of("mine", 1.0, routes={"eagle3": 30, "dflash": 10})
    share = {"target": 0.5, "draft": 0.3, "rest": 0.2, "seconds": 0.01, "rounds": 7}
    row = row_of([run], "mine", shares={("mine", 4): share, ("mine", 8): None})
    assert row.route_shares == {"eagle3": 0.75, "dflash": 0.25} and row.round_shares == share
    assert row_of([run_of("mine", 1.0, routes={})], "mine").route_shares is None
    learned = run_of("mine", 1.0, routes={"dflash": 40}, repeat=1)
    learned.groups["chat"]["generations"][0]["num_target_calls"] -= 1
    row = row_of([run, learned], "mine")
    assert row.route_shares == {"eagle3": 0.375, "dflash": 0.625}
    assert row.rounds_by_repeat == [row.num_rounds, row.num_rounds - 1]


# ---- whose turn it is


TWO_KINDS = [Prompt(category=kind, turns=("a",), where=f"{kind} {i}") for kind in ("chat", "code") for i in (0, 1)]


def test_methods_take_turns():
    """At every prompt where these come one at a time, else at every category."""
    order = schedule(["plain", "a"], [1, 4], 2, stay_up=True, prompts=lambda size: TWO_KINDS[: 3 if size == 1 else 4])
    timed = [one for one in order if one.is_timed]
    prompts = {1: [("chat", 0), ("chat", 1), ("code", 0)], 4: [("chat", None), ("code", None)]}
    turns = [(size, repeat, *prompt) for repeat in (0, 1) for size in (1, 4) for prompt in prompts[size]]
    assert timed == [Pass(method, *turn) for turn in turns for method in ("plain", "a")]
    assert [one[:2] for one in order[20:]] == [("plain", 1), ("plain", 4), ("a", 1), ("a", 4)]
    assert not any(one.is_timed for one in order[20:])


def test_engines_that_are_started_anew_do_all_of_a_repeat_at_once():
    order = schedule(["plain", "a"], [1, 4], 2, stay_up=False, prompts=lambda size: TWO_KINDS)
    assert [one.method for one in order] == ["plain"] * 2 + ["a"] * 2 + ["plain"] * 4 + ["a"] * 4
    assert [one.repeat for one in order] == [0, 0, 0, 0, 1, 1, None, None, 1, 1, None, None]


def test_what_is_left_is_estimated_from_what_is_done():
    plan = schedule(["plain", "a"], [1, 4], 2, stay_up=False, prompts=lambda size: TWO_KINDS)
    found = Measurement([], plan, str, lambda row, number: "")
    assert found.remaining(plan, 2) is None
    found.seconds[plan[0]], found.starts = 10.0, [3.0]
    assert found.remaining([Pass("plain", 1, 1), Pass("a", 1, 0), Pass("a", 4, 0)], 1) == 10 + 10 + 10 + 3
    found.seconds[Pass("a", 4, 0)] = 4.0
    assert found.remaining([Pass("plain", 4, 1), Pass("plain", 1, 1)], 0) == 4 + 10
    found.seconds[Pass("b", 1, 0, "code")], found.seconds[Pass("b", 1, 0, "chat")] = 3.0, 5.0
    assert found.remaining([Pass("b", 1, 1, "code"), Pass("b", 1, 1, "math")], 0) == 3 + 4
    assert found.unfinished == ["plain", "a"]
    found.seconds |= dict.fromkeys(plan[:-1], 1.0)
    assert plan[-1].method == "a" and found.unfinished == ["a"]
    assert runner.clock(125.7) == "2:05"


def test_engines_are_kept_where_memory_is_enough(monkeypatch, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x" * (1 << 20))
    config = {"drafters": {"a": {"model": str(tmp_path)}}}
    jobs = [
        Job(method="m", engine={"model": str(tmp_path), "speculative_config": config}, sampling={}, prompts=[])
        for _ in range(3)
    ]
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    monkeypatch.setattr(platform(), "on_cores", True)
    needed = 3 * (bench.ENGINE_GIB + 2 + 2 / 1024)
    for free, enough in ((needed + 0.01, True), (needed - 0.01, False)):
        monkeypatch.setattr(bench, "available_gib", lambda free=free: free)
        assert bench.fits(jobs)[0] is enough
    jobs[0].engine["kv_cache_memory_bytes"] = 1 << 30
    assert bench.fits(jobs)[0] is True
    monkeypatch.setattr(platform(), "on_cores", False)
    assert bench.fits(jobs) == (
        False,
        "2.76 of a GPU's memory for 3 engines (--gpu-memory-utilization 0.31 lets all stay up)",
    )
    small = [Job(method="m", engine={"model": "m", "gpu_memory_utilization": 0.31}, sampling={}, prompts=[])] * 3
    assert bench.fits(small)[0] is True


PLAYED_TURNS = """
name = (job["engine"].get("speculative_config") or {}).get("who", "plain")
def note(text):
    open(os.environ["NOTES"], "a").write(f"{name} {text}\\n")
note("starts")
emit("ready", seconds=1.0, versions={"vllm": "0"}, device="cpu")
for order in map(json.loads, open(job["orders"])):
    note(json.dumps(order))
    for group in job["groups"]:
        if group["category"] in order.get("categories", []):
            number = order["number"]
            answered = group["prompts"] if number is None else [group["prompts"][number]]
            one = [dict(token_ids=[1, len(p["where"])], num_target_calls=2, accepted_histogram=[]) for p in answered]
            counts = dict(seconds=0.5 * len(one), num_verified_tokens=len(one), routes={name: len(one)})
            emit("group", category=group["category"], **counts, generations=one)
    emit("shares", shares=dict(target=0.5, draft=0.25, rest=0.25, seconds=0.001, rounds=3))
    emit("done")
note("ends")
"""


@pytest.mark.parametrize("keep", [True, False])
def test_engines_follow_the_plan(play, tmp_path, crossspec, monkeypatch, keep):
    play(PLAYED_TURNS)
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    spec, out = spec_file(tmp_path, "a", who="a"), tmp_path / "out.json"
    how = "--keep-engines" if keep else "--restart-engines"
    arguments = ["bench", "--model", "m", "--spec", spec, "--repeats", 2, "--batch-sizes", "4,1", how, "--json", out]
    code, _, err = crossspec(*arguments, "--limit", 2)
    assert code == 0
    prompts = map(json.loads, (POCKET / "prompts.jsonl").read_text().splitlines())
    kinds = list(dict.fromkeys(prompt["category"] for prompt in prompts))

    def timed(size, chosen, number=None):
        order = {"batch_size": size, "warm_up": kinds[0] in chosen and not number, "waves": None, "categories": chosen}
        return json.dumps({**order, "number": number})

    shares = '{"batch_size": %d, "shares": true}'
    noted = (tmp_path / "notes").read_text().splitlines()
    if keep:
        one_by_one = [timed(1, [kind], number) for kind in kinds for number in (0, 1)]
        orders = [*one_by_one, *(timed(4, [kind]) for kind in kinds)] * 2
        turns = [f"{name} {order}" for order in orders for name in ("plain", "a")]
        turns[0:1] = ["plain starts", turns[0], "a starts"]
        ends = [[f"{name} {shares % 1}", f"{name} {shares % 4}", f"{name} ends"] for name in ("plain", "a")]
        assert noted == turns + ends[0] + ends[1]
    else:
        for part, last in ((noted[:8], []), (noted[8:], [shares % 1, shares % 4])):
            visits = [["starts", timed(1, kinds), timed(4, kinds), *last, "ends"]] * 2
            assert part == [f"{n} {what}" for n, visit in zip(("plain", "a"), visits, strict=True) for what in visit]
    document = json.loads(out.read_text())
    found = {(row["method"], row["batch_size"]): row for row in document["rows"] if row["category"] == "all"}
    assert [*found] == [("plain", 1), ("a", 1), ("plain", 4), ("a", 4)]
    for (name, _), row in found.items():
        assert row["repeats"] == 2 and row["round_shares"]["draft"] == 0.25 and row["seconds"] == 4.0
        assert row["num_prompts"] == row["num_verified_tokens"] == 8 and row["route_shares"] == {name: 1.0}
        assert row["identical_to_plain"] is True
    assert document["meta"]["configs"] == {"plain": None, "a": {"who": "a"}}
    told = [line.partition(":")[0] for line in err.splitlines() if " tokens in " in line]
    assert len(told) == 8 and told[0] == "plain, batch size 1, repeat 1"
    assert "a category has 2 prompts: so many of its requests run at a time, not 4" in err


# ---- the closed loop


class PlayedLLM:
    """Answers every request in as many steps as its first token says, two tokens a step, and sees who is in flight."""

    def __init__(self):
        self.llm_engine = self
        self.model_config = SimpleNamespace(max_model_len=100)
        self.in_flight, self.most, self.asked, self.clock = {}, 0, [], 100.0

    def get_tokenizer(self):
        return SimpleNamespace(chat_template=None, encode=lambda text: [len(text)])

    def add_request(self, request_id, prompt, params):
        assert request_id not in self.in_flight
        self.in_flight[request_id] = [prompt["prompt_token_ids"][0], self.clock]
        self.asked.append((request_id, params.seed, params.output_kind.name))
        self.most = max(self.most, len(self.in_flight))

    def step(self):
        self.clock += 0.25
        outputs = []
        for name, state in list(self.in_flight.items()):
            state[0] -= 1
            finished = state[0] == 0
            if finished:
                del self.in_flight[name]
            accepted = SimpleNamespace(histogram=[0, 3], num_draft_tokens=21) if finished else None
            delta = SimpleNamespace(token_ids=[1, 2], text="ab", spec_decode_metrics=accepted)
            times = SimpleNamespace(first_token_latency=0.25, last_token_ts=self.clock)
            outputs.append(SimpleNamespace(request_id=name, outputs=[delta], metrics=times, finished=finished))
        return outputs


def conversations(llm, *turns):
    return [client.Conversation(llm, {"where": "here", "turns": list(one)}, None) for one in turns]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 9])
def test_no_more_requests_are_in_flight_than_asked_for(batch_size):
    llm, told = PlayedLLM(), []
    texts = [("a" * n,) for n in (4, 1, 1, 3, 2, 5, 1)]
    answers = client.answer(llm, conversations(llm, *texts), {}, batch_size, told.append)
    assert llm.most == min(batch_size, len(texts)) and not llm.in_flight
    assert [generation.num_target_calls for generation in answers] == [4, 1, 1, 3, 2, 5, 1]
    assert sum(told) == 2 * 17
    if batch_size == 2:  # an answer makes room at once: 4, 2, 1 steps beside 1, 1, 3, 5
        assert len(told) == 10


def test_answers_come_with_their_times_and_counts():
    llm = PlayedLLM()
    generation, _ = client.answer(llm, conversations(llm, ("aaa",), ("a",)), {"seed": 7}, 1)
    assert generation == ([1, 2] * 3, "ab" * 3, 3, [0, 3], 21, 0.25, [100.25, 100.5, 100.75])
    assert llm.asked == [("0-0", 7, "DELTA"), ("0-1", 8, "DELTA")]


def test_turns_of_a_conversation_wait_for_each_other():
    """Answers are in the order of turns, then of conversations; a second turn has the first and its answer before."""
    llm = PlayedLLM()
    answers = client.answer(llm, conversations(llm, ("aaaaa", "b"), ("a", "c"), ("aa",)), {}, 2)
    assert [name for name, *_ in llm.asked] == ["0-0", "0-1", "0-2", "1-1", "1-0"]
    lengths = [5, 1, 2, len("\n".join(["aaaaa", "ab" * 5, "b"])), len("\n".join(["a", "ab", "c"]))]
    assert [generation.num_target_calls for generation in answers] == lengths


# ---- data sets


SPEC_BENCH = {"question_id": 81, "category": "writing", "turns": ["Write a blog post.", "Rewrite it."]}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": "def has_close_elements(numbers, threshold):\n",
    "entry_point": "has_close_elements",
    "canonical_solution": "    return False\n",
    "test": "def check(candidate):\n",
}
GSM8K = {"question": "Natalia sold clips to 48 of her friends.", "answer": "48/2 = <<48/2=24>>24\n#### 72"}
MATH = {
    "problem": "Convert the point $(0,3)$.",
    "solution": "...",
    "answer": "...",
    "subject": "Precalculus",
    "level": 2,
}
SHAREGPT = [
    {"id": "a_0", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    {"id": "a_1", "conversations": []},
    {"id": "a_2", "conversations": [{"from": "gpt", "value": "as I said"}, {"from": "human", "value": "Yes"}]},
    {"id": "a_3", "conversations": [{"from": "human", "value": "Bye"}, {"from": "gpt", "value": "So long"}]},
]


def lines(*found):
    return "".join(json.dumps(row) + "\n" for row in found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (lines(SPEC_BENCH), [("writing", ("Write a blog post.", "Rewrite it."), "line 1")]),
        (lines(HUMANEVAL), [("humaneval", (HUMANEVAL["prompt"],), "line 1")]),
        (lines(GSM8K, GSM8K), [("gsm8k", (GSM8K["question"],), f"line {n}") for n in (1, 2)]),
        (lines(MATH), [("math-500", (MATH["problem"],), "line 1")]),
        (json.dumps(SHAREGPT, indent=1), [("sharegpt", ("Hi",), "entry 1"), ("sharegpt", ("Bye",), "entry 4")]),
        (lines(*SHAREGPT), [("sharegpt", ("Hi",), "line 1"), ("sharegpt", ("Bye",), "line 4")]),
        (json.dumps([{"prompt": "a"}]), [("prompts", ("a",), "entry 1")]),
    ],
)
def test_public_formats_are_told_apart(tmp_path, text, expected):
    file = tmp_path / "data"
    file.write_text(text)
    assert [(p.category, p.turns, p.where) for p in read_prompts(file)] == [
        (category, turns, f"{file}, {where}") for category, turns, where in expected
    ]


def test_a_format_can_be_named(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text(lines({"prompt": "p", "question": "q", "turns": ["t"], "problem": "r", "conversations": []}))
    with pytest.raises(ValueError, match=r"has `prompt` and `turns` and .*`question`.*: say --dataset-format, one of"):
        read_prompts(file)
    for form, text in (("humaneval", "p"), ("gsm8k", "q"), ("spec-bench", "t"), ("mt-bench", "t"), ("math-500", "r")):
        assert [p.turns for p in read_prompts(file, form)] == [(text,)]
    with pytest.raises(ValueError, match="holds no prompt"):
        read_prompts(file, "sharegpt")


@pytest.mark.parametrize(
    ("text", "form", "sentence"),
    [
        (lines(GSM8K, {"question": 3}), None, "line 2 needs `question` (a text that is not empty), as gsm8k has"),
        (
            lines(HUMANEVAL, {"task_id": "x"}),
            None,
            "line 2 needs `prompt` (a text that is not empty), as humaneval has",
        ),
        (lines({"prompt": "p"}), "mt-bench", "line 1 needs `turns` (a list of texts), as question.jsonl has"),
        (json.dumps([SHAREGPT[0], {"conversations": "x"}]), None, "entry 2 needs `conversations`, a list of messages"),
        ('[\n{"conversations": []},\n{]', None, "line 3 is not JSON"),
        ("[3]", None, "entry 1 is not an object"),
    ],
)
def test_a_bad_row_of_a_data_set_is_named(tmp_path, text, form, sentence):
    file = tmp_path / "data.json"
    file.write_text(text)
    with pytest.raises(ValueError) as problem:
        read_prompts(file, form)
    assert f"{file}, {sentence}" in str(problem.value)


# ---- what is refused


def test_engine_arguments_are_checked():
    assert parse_engine_args('{"max_num_batched_tokens": 64}') == {"max_num_batched_tokens": 64}
    for given, sentence in (
        ("{", "--engine-args { is not JSON"),
        ("3", "--engine-args 3 is not an object"),
        ('{"max_num_seqs": 3}', "--engine-args: max_num_seqs is not to be set here: it is the largest of"),
    ):
        with pytest.raises(ValueError) as problem:
            parse_engine_args(given)
        assert sentence in str(problem.value)
    with pytest.raises(ValueError, match="^--engine-args max_model_length: .* did you mean 'max_model_len'"):
        offline.check_engine({"model": "m", "max_model_length": 3})


def test_options_that_cannot_be_met_are_refused_first(tmp_path, crossspec, monkeypatch):
    cases = {
        ("--batch-sizes", "1,x"): "--batch-sizes 1,x: give numbers of requests with commas between them",
        ("--batch-sizes", "0"): "at least one request at a time",
        ("--dataset-format", "gsm8"): "did you mean 'gsm8k'?",
        ("--csv", tmp_path / "no" / "x.csv"): "--csv",
        ("--html", tmp_path / "x.html"): 'run `pip install "vllm-crossspec[bench]"`',
    }
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    for arguments, sentence in cases.items():
        code, _, err = crossspec("bench", "--model", "m", *arguments)
        assert code == 2 and sentence in " ".join(err.split()), arguments


# ---- reports


def test_engine_arguments_go_over_ours(play, tmp_path, crossspec):
    play(f"open({str(tmp_path / 'seen')!r}, 'w').write(json.dumps(job))\n{GENERATE}")
    given = '{"enforce_eager": true, "max_num_batched_tokens": 64}'
    assert crossspec("bench", "--model", "m", "--engine-args", given)[0] == 0
    engine = json.loads((tmp_path / "seen").read_text())["engine"]
    assert engine["enforce_eager"] is True and engine["max_num_batched_tokens"] == 64 and engine["max_num_seqs"] == 8


class Page(HTMLParser):
    """What a page loads, and the text of its cells."""

    def __init__(self):
        super().__init__()
        self.loads, self.tags, self.text = [], [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [(tag, name, value) for name, value in attrs if name in ("src", "href", "xlink:href", "srcset")]

    def handle_data(self, data):
        self.text += data


def test_reports_say_what_was_measured(play, tmp_path, crossspec, monkeypatch):
    play(PLAYED_TURNS)
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    spec = spec_file(tmp_path, "a<b", who="a")
    out = {option: tmp_path / f"out.{option}" for option in ("csv", "markdown", "html", "json")}
    files = [part for option, file in out.items() for part in (f"--{option}", file)]
    status, printed, _ = crossspec("bench", "--model", "m", "--spec", spec, "--batch-sizes", "1,4", *files)
    assert status == 0
    document = json.loads(out["json"].read_text())

    with out["csv"].open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(document["rows"]) == 2 * 2 * 5
    for cells, row in zip(table, document["rows"], strict=True):
        assert (cells["method"], cells["category"]) == (row["method"], row["category"])
        assert float(cells["speedup"]) == row["speedup"] == float(cells["speedup_min"])
        assert cells["ttft_p50"] == "" and float(cells["round_draft"]) == 0.25

    markdown = out["markdown"].read_text()
    assert len(re.findall(r"^\| (plain|a<b) \| [14] \|", markdown, re.M)) == 4 + 20
    widths = {line.count("|") for line in markdown.split("\n\n")[0].splitlines()}
    assert len(widths) == 1

    content = out["html"].read_text()
    page = Page()
    page.feed(content)
    assert page.tags.count("svg") == 3  # nothing was drafted: no plot of positions
    assert all(value.startswith("#") for _, _, value in page.loads)
    assert not {"script", "link", "iframe", "img", "base"} & {*page.tags} and "@import" not in content
    assert not re.search(r"url\((?!#)", content)
    for svg in re.findall(r"<svg.*?</svg>", content, re.S):
        xml.dom.minidom.parseString(svg)
    for text in ("a<b", "Speedup by batch size", '"who": "a"', document["meta"]["hardware"]["cpu"], "vllm 0"):
        assert text in page.text, text
    assert "they say nothing of a GPU" in page.text

    for told in (page.text, " ".join(printed.split()), markdown):
        assert told.count('"by_batch_size": {"1": 0}') == 1

    # Cells wrap to the window's width, and what is wider still scrolls in its own box.
    (style,) = re.findall(r"<style>(.*?)</style>", content, re.S)
    rules = dict(re.findall(r"([^{}]+?) *\{ *([^{}]*?) *\}", style.replace("\n", " ")))
    assert not [rule for rule in rules.values() if "nowrap" in rule]
    assert content.count("<table") == content.count('<div class="wide"><table') == 3
    assert rules[" .wide"] == "overflow-x: auto;" and "anywhere" in rules[" .facts td, h1"]
    assert "text-align: left" in rules[" th:first-child, td:first-child, .facts td"]


def test_a_speedup_on_a_cpu_is_not_speculation_alone():
    """What is said of it, where there is one: not on a GPU, not of plain, not without plain."""
    both = rows.rows([run_of("plain", 2.0), run_of("tree", 1.0)])
    on = {device: {"hardware": {"device": device}} for device in ("cpu", "cuda")}
    assert "#products" in report.speedup_note(both, on["cpu"]) and report.speedup_note(both, on["cuda"]) is None
    for alone in ("plain", "tree"):
        assert report.speedup_note(rows.rows([run_of(alone, 1.0)]), on["cpu"]) is None


def test_small_batches_answer_fewer_prompts_where_they_are_told_to():
    prompts = [Prompt(category=kind, turns=("a",), where=f"{kind}{i}") for kind in "xy" for i in range(5)]
    job = Job(method="m", engine={}, sampling={}, prompts=prompts, waves=2)
    assert [prompt.where for prompt in job.at(1)] == ["x0", "x1", "y0", "y1"]
    assert [len(job.at(size)) for size in (2, 3, 64)] == [8, 10, 10]
    assert replace(job, waves=None).at(1) == prompts


# ---- engines


@pytest.mark.nightly
@pytest.mark.e2e
def test_methods_of_vllm_and_ours_are_measured_alike(tmp_path):
    """One run: plain, vLLM's own EAGLE-3, and a router of ours with a tree."""
    native = {"method": "eagle3", "model": str(POCKET / "eagle3"), "num_speculative_tokens": 7}
    specs = {
        "native": native,
        "routed": {
            "method": "whiflash",
            "drafters": {
                "eagle3": {"model": str(POCKET / "eagle3"), "tree": {"depth": 3, "top_k": 4, "num_nodes": 12}},
                "dflash": {"model": str(POCKET / "dflash"), "num_speculative_tokens": 7},
            },
            "router": {"policy": "neural", "model": str(POCKET / "router")},
        },
    }
    files = [part for name, config in specs.items() for part in ("--spec", spec_file(tmp_path, name, **config))]
    out = tmp_path / "out.json"
    texts = (POCKET / "prompts.jsonl").read_text().splitlines()[::8]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(lines(*({"prompt": json.loads(text)["prompt"]} for text in texts)))
    cache = ("--engine-args", json.dumps({"kv_cache_memory_bytes": 128 << 20}))
    small = "--dtype float32 --max-tokens 10 --ignore-eos --batch-sizes 1,2 --waves 2 --repeats 2 --keep-engines"
    run_command(
        "bench", "--model", POCKET / "target", *files, *small.split(), "--prompts", prompts, "--json", out, *cache
    )
    document = json.loads(out.read_text())
    found = {(r["method"], r["batch_size"]): r for r in document["rows"] if r["category"] == "all"}
    assert [*found] == [(name, size) for size in (1, 2) for name in ("plain", *specs)]
    for (name, size), row in found.items():
        assert (
            row["identical_to_plain"] is True and row["num_tokens"] == (20 if size == 1 else 30) and row["repeats"] == 2
        )
        low, high = row["tokens_per_second_range"]
        assert 0 < low <= row["tokens_per_second"] <= high
        for what in ("ttft", "tpot", "itl"):
            assert 0 < row[what]["p50"] <= row[what]["p90"] <= row[what]["p99"] < 60
        shares = row["round_shares"]
        assert shares["target"] > 0 and shares["rest"] > 0 and shares["rounds"] > 2
        assert shares["target"] + shares["draft"] + shares["rest"] == pytest.approx(1)
        assert (shares["draft"] > 0) is (name != "plain")
        assert (row["route_shares"] is not None) is (name == "routed")
        assert row["speedup_range"][0] <= row["speedup"] <= row["speedup_range"][1]
        if size == 1:
            assert row["tpot"]["p50"] < 1.5 * row["itl"]["p99"]
    plain, ours = found["plain", 1], found["native", 1]
    assert plain["acceptance_rate"] is None and plain["tokens_per_round"] == 1.0
    accepted = sum(ours["accepted_per_position"])
    assert ours["num_draft_tokens"] == 7 * round(accepted / (ours["acceptance_length"] - 1))
    assert ours["acceptance_rate"] == pytest.approx(accepted / ours["num_draft_tokens"])
    assert 0 < found["routed", 1]["acceptance_rate"] < 1
    assert sum(found["routed", 1]["route_shares"].values()) == pytest.approx(1)
