"""The pocket ConFu in engines: its futures and drafts are those of training's code, and chains gain by them."""

import os
from itertools import pairwise
from typing import Any
from unittest import mock

import confu_offline
import engines
import pytest
import sabotage
import torch

from crossspec_tools.train.confu import load_confu
from crossspec_tools.train.generations import Generation
from crossspec_tools.train.states import FrozenTarget, load_target
from vllm_crossspec.drafters.eagle3.checkpoint import default_target_layers

pytestmark = pytest.mark.e2e

SETTINGS = {"enable_prefix_caching": False, "async_scheduling": False, "max_num_batched_tokens": 512}
CHAIN = {"method": "confu", "model": str(engines.CONFU), "num_speculative_tokens": engines.K}
# Training and the offline rounds take probabilities as they are.
SPECS = {"chain": CHAIN, "tree": engines.tree("confu", engines.CONFU, sharpness=1.0)}
MAX_STEPS = 8
"""Tokens of the deepest path of a pocket tree."""


@pytest.fixture(scope="module", params=SPECS)
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def llm(mode):
    """In this process: its tensors are taken out, and all prompts are there before the first step."""
    in_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with mock.patch.dict(os.environ, in_process), engines.engine(SPECS[mode], **SETTINGS) as running:
        yield running


@pytest.fixture(scope="module")
def target():
    model, _ = load_target(engines.TARGET, torch.float32, torch.device("cpu"))
    return FrozenTarget(model, default_target_layers(model.config.num_hidden_layers), False)


@pytest.fixture(scope="module")
def trained(target):
    """The pocket drafter as training has it."""
    return load_confu(engines.CONFU, engines.TARGET, target.config, "model")


# -- an engine's rounds against training's code ---------------------------------------------------------------------


def watch_rounds(worker: Any) -> None:
    """Keep what a lone request's rounds begin with, and every level's nodes and candidates."""
    runner = worker.model_runner
    proposer, made = runner.speculator.proposers["confu"], runner.features["contemplate"]
    worker.rounds = []

    def wrap_sampled(original):
        def sampled(step, final_states):
            original(step, final_states)
            slot = step.batch.idx_mapping[0]
            future = made.futures[slot].cpu().clone() if made.has_future[slot] else None
            worker.rounds.append({"future": future, "nodes": [], "candidates": []})

        return sampled

    def wrap_forward(original):
        def forward_beam(level, beam, *rest):
            latest = worker.rounds[-1]
            latest["place"] = int(proposer.input_buffers.positions[0])
            latest["nodes"].append((beam.tokens[0].cpu().clone(), beam.parents[0].cpu().clone()))
            return original(level, beam, *rest)

        return forward_beam

    def wrap_candidates(original):
        def candidates(*arguments):
            log_probs, tokens = original(*arguments)
            worker.rounds[-1]["candidates"].append((log_probs.cpu().clone(), tokens.cpu().clone()))
            return log_probs, tokens

        return candidates

    sabotage._replace(worker, made, "sampled", wrap_sampled)
    sabotage._replace(worker, proposer, "_forward_beam", wrap_forward)
    sabotage._replace(worker, proposer.head, "candidates", wrap_candidates)


def take_rounds(worker: Any) -> list[dict[str, Any]]:
    return worker.rounds


def along_the_text(found: dict[str, Any], tokens: list[int]) -> Any:
    """Of one round, level by level as deep as its nodes are the text: candidates' log-probabilities and tokens."""
    row = 0
    for level, ((ids, parents), (log_probs, drafted)) in enumerate(
        zip(found["nodes"], found["candidates"], strict=True)
    ):
        place = found["place"] + 1 + level
        if level:
            here = [
                node
                for node in range(len(ids))
                if place < len(tokens) and ids[node] == tokens[place] and (level == 1 or parents[node] == row)
            ]
            if not here:
                return
            row = here[0]
        yield log_probs.view(-1, log_probs.shape[-1])[row], drafted.view(-1, drafted.shape[-1])[row]


def watched(llm: Any, prompt: str, how: Any) -> tuple[int, list[int], list[dict[str, Any]]]:
    """Length of the prompt, prompt and text, and the rounds in which the text was drafted."""
    llm.collective_rpc(how)
    llm.collective_rpc(watch_rounds)
    tokens = llm.get_tokenizer().encode(prompt)
    start = len(tokens)
    try:
        tokens += engines.generate(llm, [prompt], max_tokens=48)[0]
        rounds = llm.collective_rpc(take_rounds)[0]
    finally:
        llm.collective_rpc(sabotage.mend)
    return start, tokens, [r for r in rounds if r["nodes"] and start - 1 <= r["place"] < len(tokens) - 1]


@torch.no_grad()
def differences(llm: Any, target: Any, model: Any, how: Any) -> tuple[list[float], dict[int, list[float]]]:
    """Largest differences of the futures, one a round, and of the candidates' log-probabilities, by level."""
    futures: list[float] = []
    levels: dict[int, list[float]] = {}
    index = {token: number for number, token in enumerate(model.kept.tolist())}
    for prompt in engines.prompts(3):
        _, tokens, rounds = watched(llm, prompt, how)
        text = torch.tensor(tokens)[None]
        states, cache = target.states_and_cache(text)
        for before, found in pairwise([None, *rounds]):
            place = torch.tensor([[found["place"]]])
            future = model.no_future_embed[None, None]
            if found["future"] is not None:
                # The row's gate is the newest token whose states the round before knew.
                future = model.futures(target, cache, states.taps[:, [before["place"]]], place)
                futures.append((future[0, 0] - found["future"]).abs().max().item())
            entries, skip = model.future_entries(states, future, place), model.future_skip(future)
            expected = model.unroll(states, text, target.embedding, place, MAX_STEPS, last_entry=entries, skip=skip)
            pairs = zip(along_the_text(found, tokens), expected, strict=False)
            for level, ((got, drafted), logits) in enumerate(pairs):
                wanted = logits[0, 0].log_softmax(-1)[[index[token] for token in drafted.tolist()]]
                levels.setdefault(level, []).append((wanted - got).abs().max().item())
    return futures, levels


def test_futures_and_drafts_are_trainings(llm, mode, target, trained):
    """In trees as in chains, at every level: what is learned is what is served, up to float32 rounding."""
    futures, levels = differences(llm, target, trained, sabotage.mend)
    assert len(futures) > 10 and max(futures) < 1e-3
    assert len(levels) == (MAX_STEPS if mode == "tree" else engines.K)
    worst = {level: max(found) for level, found in levels.items()}
    assert max(worst.values()) < 1e-3, worst


def test_without_soft_prompts_futures_are_others(llm, target, trained):
    futures, _ = differences(llm, target, trained, sabotage.hide_soft_prompts)
    assert max(futures) > 0.1


@pytest.mark.parametrize("mode", ["tree"], indirect=True)  # a chain's accepted rows are in place
def test_other_states_make_other_drafts(llm, target, trained):
    _, levels = differences(llm, target, trained, sabotage.leave_states_in_place)
    assert max(max(found) for found in levels.values()) > 0.1


@pytest.mark.parametrize("how", [sabotage.mend, sabotage.foresee_nothing])
def test_offline_rounds_are_an_engines(llm, mode, target, trained, how):
    """research/confu_offline.py ends its rounds where this engine ends them."""
    size = confu_offline.Size(60, 8, 10) if mode == "tree" else confu_offline.Size(engines.K, engines.K, 1)
    compared = 0
    for prompt in engines.prompts(3):
        start, tokens, rounds = watched(llm, prompt, how)
        tokens = tokens[: -size.depth - 1]  # so that the engine has a round behind the last one
        row = Generation(tokens[:start], tokens[start:], "chat", True)
        walk = confu_offline.decode(trained, target, [row], size, futures=how is sabotage.mend).walk
        places = [found["place"] for found in rounds]
        inside = [place for place in places if place + 1 + size.depth < len(tokens)]
        assert walk.rounds[0] == len(inside)
        assert walk.tokens[0] == places[len(inside)] - places[0]
        compared += len(inside)
    assert compared > 8


# -- what futures are worth -----------------------------------------------------------------------------------------


def run_broken(llm: Any, how: Any) -> tuple[list[list[int]], float]:
    """Texts of the demo's prompts and accepted tokens a draft, with one part broken."""
    llm.collective_rpc(how)
    before = llm.collective_rpc("crossspec_stats")[0]["confu"]
    try:
        texts = engines.generate(llm, engines.prompts(24), max_tokens=40)
    finally:
        llm.collective_rpc(sabotage.mend)
    after = llm.collective_rpc("crossspec_stats")[0]["confu"]
    accepted, drafts = (after[name] - before[name] for name in ("accepted_tokens", "drafts"))
    return texts, accepted / drafts


@pytest.fixture(scope="module")
def whole(llm):
    return run_broken(llm, sabotage.mend)


@pytest.mark.parametrize("mode", ["chain"], indirect=True)
@pytest.mark.parametrize("how", [sabotage.foresee_noise, sabotage.foresee_nothing])
def test_chains_gain_by_their_futures(llm, whole, how):
    """Of trees that is not shown (docs/results/confu.md)."""
    texts, accepted = run_broken(llm, how)
    assert texts == whole[0]
    assert accepted < whole[1]
