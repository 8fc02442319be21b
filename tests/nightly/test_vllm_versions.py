"""What differs between the versions of vLLM that this project runs with, as far as the installed one can show it.

Where another version does something else, its part is played: a property that it has and this one lacks, the layout of
its masks, the initialiser that asks early. ``test_vllm_seam`` reads the other versions themselves.
"""

import dataclasses
import tomllib
from pathlib import Path
from types import SimpleNamespace

import engines
import numpy as np
import pytest
import torch
from test_bad_input import EAGLE3, config_of, whiflash
from vllm.config.vllm import VllmConfig
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.worker.gpu import structured_outputs
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_crossspec.config.parse import parse
from vllm_crossspec.drafters.confu import feature as contemplate
from vllm_crossspec.drafting.proposer import HeadSampling
from vllm_crossspec.hooks import install as hooks
from vllm_crossspec.hooks.scheduler import _as_scheduled
from vllm_crossspec.step.step import Step
from vllm_crossspec.vllm_api import check, run
from vllm_crossspec.vllm_api.points import INVENTORIES, RANGE, inventory_of

CHAIN = {"type": "chain"}


# ---- which versions


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.33.0", "0.33.2+cu130", "0.32.0+cpu"])
def test_supported_versions_are_compared_with_their_own_list(version):
    assert check.version_problem(version) is None
    assert inventory_of(version).release == ".".join(version.split(".")[:2]) + ".0"


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.32.0", "0.33", "dev", "0.331.0", "0"])
def test_other_versions_are_refused(version):
    sentence = check.version_problem(version)
    assert (sentence is None) == (version == "0.33")
    if sentence is not None:
        assert sentence.startswith(f"vllm_crossspec needs vLLM >=0.32,<0.34 and found {version}; install vllm==0.33.0")


def test_the_range_is_the_packages():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    assert extras["cuda"] == [f"vllm{RANGE}"]
    assert list(INVENTORIES) == sorted(INVENTORIES)


# ---- prefix hashes and running requests


@pytest.fixture
def unhooked(monkeypatch):
    """``VllmConfig``, whose members of a test's own are gone when it ends."""
    return lambda name, value: monkeypatch.setattr(VllmConfig, name, value, raising=False)


DART = {"method": "dart", "model": str(engines.DART), "tree": CHAIN}
DFLASH = engines.ours("dflash", engines.DFLASH)


@pytest.mark.parametrize(
    ("spec", "carrier", "tokens"), [(whiflash(), "dflash", 1), (DART, "dflash", 1), (DFLASH, "dflash", 0)]
)
def test_hashes_look_ahead_where_a_drafters_cache_does(unhooked, spec, carrier, tokens):
    unhooked("num_hash_lookahead_tokens", property(lambda self: 0))  # as of a block drafter's engine in 0.33
    hooks._hook_prefix_hashes()
    config = config_of(spec, enable_prefix_caching=True)
    assert config.speculative_config.method == carrier
    config.speculative_config.disable_lookahead_block_hashes = False
    assert config.num_hash_lookahead_tokens == tokens
    config.speculative_config.disable_lookahead_block_hashes = True
    assert config.num_hash_lookahead_tokens == 0
    config.speculative_config.disable_lookahead_block_hashes = False
    config.cache_config.enable_prefix_caching = False
    assert config.num_hash_lookahead_tokens == 0


def test_what_vllm_says_of_prefix_hashes_stays(unhooked):
    unhooked("num_hash_lookahead_tokens", property(lambda self: 3))
    hooks._hook_prefix_hashes()
    assert config_of(engines.native("eagle3", engines.EAGLE3)).num_hash_lookahead_tokens == 3
    assert config_of(EAGLE3).num_hash_lookahead_tokens == 3


def test_a_version_without_such_hashes_is_left_alone(monkeypatch):
    monkeypatch.delattr(VllmConfig, "num_hash_lookahead_tokens", raising=False)
    hooks._hook_prefix_hashes()
    assert not hasattr(VllmConfig, "num_hash_lookahead_tokens")


@pytest.mark.parametrize(
    ("asked", "tokens", "runs"),
    [(None, 64, 8), (3, 64, 3), (None, 512, 16), (5, 32, 4)],  # of 16; a pass has 7 + 1 rows a request
)
def test_as_many_requests_run_as_a_block_drafters_pass_has_rows_for(unhooked, asked, tokens, runs):
    def capped(self):  # as 0.33: a row for each token that is verified, of a tree of 23 nodes 24
        config = self.scheduler_config
        room = tokens // 24
        if room < (config.max_num_active_seqs or config.max_num_seqs):
            config.max_num_active_seqs = room

    config = config_of({**DFLASH, "num_speculative_tokens": 7, "tree": {"type": "best_first", "num_nodes": 23}})
    scheduler = config.scheduler_config
    scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.max_num_active_seqs = 16, tokens, asked
    unhooked("_set_max_num_scheduled_tokens", capped)
    hooks._hook_active_requests()
    config._set_max_num_scheduled_tokens()
    assert (scheduler.max_num_active_seqs or 16) == runs


# ---- the masks of grammars


def masked(logits, batch, output, mapping, stride):
    """The logits behind vLLM's kernel, which is the same in 0.32 and 0.33."""
    masks = torch.from_numpy(output.grammar_bitmask)
    assert len(masks) == len(mapping)
    logits = logits.clone()
    structured_outputs._apply_grammar_bitmask_kernel[(len(masks), 1)](
        logits,
        logits.stride(0),
        torch.tensor(mapping, dtype=torch.int32),
        batch.cu_num_logits,
        masks,
        masks.stride(0),
        logits.shape[1],
        MASK_STRIDE=stride,
        BLOCK_SIZE=64,
    )
    return logits


def test_contemplate_rows_have_no_masks_in_either_layout(monkeypatch):
    """Two grammars of three requests, which planned 5, 0 and 7 draft tokens, of which 2, 0 and 3 are nodes."""
    generator = np.random.default_rng(0)
    planned, stride, vocabulary = np.array([5, 0, 7], dtype=np.int32), 8, 64
    starts = np.array([0, 3, 4, 8], dtype=np.int32)
    batch = dataclasses.make_dataclass("Batch", ["req_ids", "num_draft_tokens_per_req", "cu_num_logits_np"])(
        ["a", "b", "c"], planned, starts
    )
    batch.cu_num_logits = torch.from_numpy(starts)
    rows = generator.integers(-(2**31), 2**31 - 1, (2, stride, 2)).astype(np.int32)
    logits = torch.from_numpy(generator.normal(size=(8, vocabulary)).astype(np.float32))
    step = Step(batch)
    step.planned_rows = batch.cu_num_logits
    feature = SimpleNamespace(_masks_of=lambda *arguments: contemplate.Contemplate._masks_of(None, *arguments))

    def sampled(output, follows):
        monkeypatch.setattr(contemplate, "MASKS_FOLLOW_DRAFTS", follows)
        return contemplate.Contemplate.before_sampling(feature, step, batch, output)

    # 0.32: a mask for the root and each planned draft; 0.33: as many for every grammar as a step can have rows.
    followed = np.concatenate([rows[0, :6], rows[1]])
    own, output = sampled(GrammarOutput(["a", "c"], followed), True)
    counts = own.num_draft_tokens_per_req
    assert counts.tolist() == [2, 0, 3]
    mapping = [index * stride + i for index in (0, 2) for i in range(counts[index] + 1)]
    first = masked(logits, batch, output, mapping, stride)
    fixed = GrammarOutput(["a", "c"], rows.reshape(-1, 2))
    _, untouched = sampled(fixed, False)
    every = [index * stride + i for index in (0, 2) for i in range(stride)]
    assert torch.equal(first, masked(logits, batch, untouched, every, stride))
    assert torch.equal(first[3], logits[3]) and first.isneginf().any(dim=1).sum() == 7
    # The one's way in the other: rows are missing.
    with pytest.raises(AssertionError):
        masked(logits, batch, sampled(fixed, True)[1], every, stride)


# ---- drafters


class Native(DraftModelSpeculator):
    """vLLM's side of a drafter: an initialiser that asks for what the settings say, and sampling that notes."""

    def __init__(self, vllm_config, device):
        self.rows = self.context_rows(3)

    def sample_draft(self, *arguments, **options):
        return len(arguments), options


class Drafter(HeadSampling, Native):
    def context_rows(self, num_reqs):
        return num_reqs * self.drafter.depth

    def samples_natively(self, draft_logits):
        return True


Drafter.__abstractmethods__ = frozenset()  # what is tested does without them
SETTINGS = SimpleNamespace(drafters={"name": SimpleNamespace(depth=5)})


def test_vllms_initialiser_may_ask_for_sizes_that_the_settings_decide():
    assert Drafter(None, torch.device("cpu"), "name", SETTINGS).rows == 15


@pytest.mark.parametrize("others", [{}, {"num_steps": 7}])
def test_what_a_version_hands_to_sampling_beside_the_rest_is_handed_on(others):
    drafter = Drafter(None, torch.device("cpu"), "name", SETTINGS)
    assert drafter.sample_draft(*range(6), None, 0, **others) == (8, others)


@pytest.mark.parametrize(("is_dummy", "agreed", "found"), [(True, 3, 3), (True, 9, 8), (True, None, 8), (False, 3, 8)])
def test_a_made_up_round_has_no_more_requests_than_the_ranks_agreed_on(is_dummy, agreed, found):
    sync = None if agreed is None else SimpleNamespace(num_reqs=agreed)
    step = SimpleNamespace(batch=SimpleNamespace(num_reqs=8), is_dummy=is_dummy, dp_sync=sync)
    assert run.num_requests(step) == found


@pytest.mark.parametrize("skips", [None, False, True])
def test_a_round_whose_drafts_nobody_can_use_is_no_measure(skips):
    output = SimpleNamespace(
        scheduled_spec_decode_tokens={"a": [1, 2]},
        num_spec_tokens_to_schedule=2,
        num_scheduled_tokens={"a": 3},
        total_num_scheduled_tokens=3,
        **({} if skips is None else {"skip_drafts": skips}),
    )
    found = _as_scheduled(output)
    assert (found is None) == bool(skips) and (found is None or (found.is_pure and found[1:3] == (2, 1)))


# ---- keys


KEYS = {"method", "model", "num_speculative_tokens", "draft_lm_head_quantization", "fly_window_size"}


def test_keys_that_would_do_nothing_are_refused():
    raw = {"method": "eagle3", "model": "m", "tree": CHAIN, "num_speculative_tokens": 3}
    parse(raw, KEYS)
    with pytest.raises(
        ValueError, match="^speculative_config.draft_lm_head_quantization: drafters take the target's output"
    ):
        parse(raw | {"draft_lm_head_quantization": "fp8"}, KEYS)
    with pytest.raises(
        ValueError, match='^speculative_config.fly_window_size: it is about .*; add "verification": "rejection"'
    ):
        parse(raw | {"fly_window_size": 2}, KEYS)
    parse(raw | {"fly_window_size": 2, "verification": "rejection"}, KEYS)
