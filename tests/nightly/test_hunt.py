"""`benchmarks/lossless.py`: what it draws, that it finds what is broken, and every case that it once found."""

import contextlib
import itertools
import json
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import ClassVar

import hunt_cases
import lossless
import pytest
import sabotage
from rich.console import Console
from test_config import NATIVE_KEYS

from vllm_crossspec.config.parse import parse
from vllm_crossspec.trees.attention import base

FOUND = sorted((Path(__file__).parent / "hunted").glob("*.json"))
SMALL = {
    "spec": {"method": "dflash", "model": "pocket/dflash", "tree": {"type": "best_first", "num_nodes": 20}},
    "engine": {"max_num_seqs": 4, "block_size": 64},
    "widths": False,
    "requests": [
        {"prompt": hunt_cases.chat(text), "sampling": {"temperature": 0.0, "max_tokens": 24}, "at": number % 3}
        for number, text in enumerate(hunt_cases.questions()[:6])
    ],
}


def test_hunt_draws_the_same_again_and_everything_beside_everything():
    assert hunt_cases.draw(3, 14, 5) == hunt_cases.draw(3, 14, 5) != hunt_cases.draw(4, 14, 5)
    cases = [hunt_cases.draw(1, number, 12) for number in range(250)]
    pairs = Counter(pair for case in cases for pair in itertools.combinations(hunt_cases.features(case), 2))
    drawn = sorted({feature for case in cases for feature in hunt_cases.features(case)})
    assert len(drawn) > 35
    apart = {(a, b) for a, b in itertools.combinations(drawn, 2) if not pairs[a, b]}
    # One case has one router; rejection sampling, sizes by request or batch and a draft model go with few others.
    few = ("router", "verification", "adaptive", "budget", "drafter draft_model", "drafter nothing")
    assert all(any(word.startswith(few) for word in pair) for pair in apart), sorted(apart)


def test_hunt_draws_configurations_that_are_taken():
    """A drawn setting that is refused would test nothing."""
    for number in range(250):
        case = hunt_cases.draw(2, number, 1)
        parse(hunt_cases.placed(case["spec"]), NATIVE_KEYS)


def test_hunt_can_be_of_cases_that_have_something():
    every, some = (
        lossless.chosen(Namespace(texts=240, each=2, first=3, seed=1, has=what)) for what in (None, "budget")
    )
    assert [number for number, _ in every] == [*range(3, 123)] and len(some) == 120
    assert [one for one in every if "budget" in hunt_cases.features(one[1])] == some[: sum(n < 123 for n, _ in some)]


def test_hunt_hands_settings_down_and_keeps_none(monkeypatch):
    """bfloat16 once stayed for whatever came later in the process."""
    started = []

    def engine_here(model, spec, **settings):
        started.append((settings["dtype"], settings["max_num_seqs"]))
        return contextlib.nullcontext()

    monkeypatch.setattr(hunt_cases, "engine_here", engine_here)
    narrow = {"dtype": "bfloat16"}
    for case, over in ((None, narrow | {"max_num_seqs": 8}), (SMALL, narrow), (None, {}), (SMALL, {})):
        with hunt_cases.engine(case, **over):
            pass
    assert started == [("bfloat16", 8), ("bfloat16", 4), ("float32", 16), ("float32", 4)]


def test_hunted_text_of_an_aborted_request_is_the_beginning_of_plains():
    case = {"requests": [{"abort_after": 3}, {"abort_after": 3}, {"abort_after": 9}, {}]}
    plain = [[1, 2, 3, 4, 5, 6]] * 4
    assert hunt_cases.differing(case, plain, [[1, 2, 3, 4], [1, 2, 4], [1, 2, 3], [1, 2, 3, 4]]) == [1, 2, 3]


def test_hunted_case_shrinks_to_what_matters():
    """Without an engine: the fault is an n-gram store, where a request asks for a penalty."""

    def fails(case):
        drafters = case["spec"].get("drafters", {"": case["spec"]}).values()
        return any("ngram" in own for own in drafters) and any(
            "presence_penalty" in request["sampling"] for request in case["requests"]
        )

    found = next(
        case for n in itertools.count() if fails(case := hunt_cases.draw(0, n, 20)) and "router" in case["spec"]
    )
    small = lossless.shrink(found, fails, tries=1000)
    assert len(small["requests"]) == 1 and small["engine"] == {} and not small["widths"]
    assert set(small["requests"][0]["sampling"]) <= {"max_tokens", "temperature", "presence_penalty"}
    assert "drafters" not in small["spec"] and set(small["spec"]) <= {"method", "model", "tree", "ngram"}
    assert lossless.shrink(found, fails, tries=2) != found  # and stops when it is told to


class Answers:
    """Plain decoding in this process; of requests that it has seen it knows the answers."""

    known: ClassVar = {}

    def texts(self, requests):
        key = json.dumps(requests)
        if key not in self.known:
            base.unregister()
            with hunt_cases.engine(None) as llm:
                self.known[key] = hunt_cases.answers(llm, requests, is_plain=True)
        return self.known[key]


@pytest.mark.e2e
def test_hunt_finds_a_broken_engine_and_writes_the_case_as_a_test(tmp_path, monkeypatch):
    """Seen with a mask that lets siblings see each other; mended, the same case has plain's text."""
    monkeypatch.setattr(hunt_cases, "draw", lambda seed, number, count: SMALL)
    given = Namespace(
        texts=6, each=6, first=0, seed=9, has=None, shrink=False, found=tmp_path, json=tmp_path / "so far"
    )
    original = hunt_cases.answers

    def broken(llm, requests, is_plain=False):
        if not is_plain:
            llm.collective_rpc(sabotage.see_siblings)
        try:
            return original(llm, requests, is_plain)
        finally:
            if not is_plain:
                llm.collective_rpc(sabotage.mend)

    sound = lossless.hunt(given, Answers(), Console(stderr=True))
    assert not sound["found"] and sound["texts"] == 6 and sound["accepted_tokens"] > 20
    assert json.loads((tmp_path / "so far").read_text())["texts"] == 6
    assert not list(tmp_path.glob("*.json"))
    monkeypatch.setattr(hunt_cases, "answers", broken)
    document = lossless.hunt(given, Answers(), Console(stderr=True))
    assert document["differing"] > 0 and document["found"][0]["case"] == 0
    (file,) = tmp_path.glob("*.json")
    assert json.loads(file.read_text()) == SMALL


@pytest.mark.e2e
@pytest.mark.parametrize("file", FOUND, ids=lambda file: file.stem)
def test_hunted_case_has_plains_text(file):
    case = json.loads(file.read_text())
    assert not hunt_cases.differing(case, Answers().texts(case["requests"]), lossless.run_case(case)[0])
