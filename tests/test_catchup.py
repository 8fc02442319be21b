"""The bookkeeping of what inactive drafters miss, against plain dictionaries, over random schedules."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hopper import compile_in_subprocess

from vllm_crossspec.arrays import ranges
from vllm_crossspec.catch_up import backlog
from vllm_crossspec.catch_up.backlog import Backlog, StepRows
from vllm_crossspec.catch_up.kernels import accepted_lengths, join_rows, last_tokens, locate
from vllm_crossspec.catch_up.naive import accepted_lengths_naive, join_rows_naive, locate_naive

POISON = -7777


def test_ranges():
    assert ranges(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]
    assert ranges(np.array([], dtype=np.int64), np.array([], dtype=np.int64)).tolist() == []


class Model:
    """One drafter's cache as a dictionary, and the features as (slot, position) pairs, under a random schedule.

    The drafter taps two of three layers, and its fuse adds one. With ``waits`` rows wait to be fused.
    """

    hidden_size, dtype, device = 2, torch.float64, torch.device("cpu")

    def __init__(self, capacity, num_slots=4, seed=0, waits=False):
        self.rng = np.random.default_rng(seed)
        self.num_fuses = self.num_written = self.num_counted = 0
        self.engine_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=num_slots))
        self.backlog = Backlog(self, [0, 2], capacity=capacity, fuses_late=waits, count=self.count)
        self.backlog.write = self.write
        self.computed = np.zeros(num_slots, dtype=np.int64)
        self.cache = [{} for _ in range(num_slots)]

    def count(self, num_tokens):
        self.num_counted += num_tokens

    def fuse(self, states):
        self.num_fuses += 1
        return states + 1

    def write(self, features, slots, positions):
        for slot, position, values in zip(slots.tolist(), positions.tolist(), features.tolist(), strict=True):
            assert position not in self.cache[slot], "written twice"
            self.cache[slot][position] = tuple(values)
            self.num_written += 1

    def step(self, slots, counts, certain, accepted):
        """Rows of a step come in; ``accepted`` of each request's rows turn out to be right."""
        starts = self.computed[slots]
        sizes = zip(slots, starts, counts, accepted, strict=True)
        values = [(slot, s + i) if i < right else (POISON, POISON) for slot, s, n, right in sizes for i in range(n)]
        features = torch.tensor(values, dtype=torch.float64).reshape(-1, 2)
        padded = torch.nn.functional.pad(features - 1, (0, 0, 2, 1))  # rows of the step that nobody is to see
        states = [padded[:, :1], torch.full_like(padded[:, :1], POISON), padded[:, 1:]]
        packed = np.arange(len(features)) + 2
        firsts = np.cumsum(counts) - counts
        self.backlog.store(states, StepRows(slots, starts, firsts, counts, certain, packed, torch.from_numpy(packed)))
        self.computed[slots] += accepted

    def check(self, slot):
        """The cache holds each cached position's own features; the buffer the rest."""
        cached, computed = self.backlog.cached[slot], self.computed[slot]
        assert self.cache[slot] == {p: (slot, p) for p in range(cached)}
        slots, positions, rows = self.backlog.missed(np.array([slot]), np.array([computed]))
        assert positions.tolist() == list(range(cached, computed)) and (slots == slot).all()
        if len(rows):
            self.backlog.fuse_waiting(np.array([slot]))
        found = self.backlog.features[torch.from_numpy(rows)]
        assert found.tolist() == [[slot, p] for p in positions]


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("capacity", [6, 17, 300])
def test_random_schedules(capacity, waits):
    depth, model = 5, Model(capacity, seed=capacity, waits=waits)
    rng = model.rng
    for _ in range(400):
        slots = np.flatnonzero(rng.random(4) < 0.7)
        if not len(slots):
            continue
        prompt = rng.random(len(slots)) < 0.2
        drafted = np.where(prompt, 0, rng.integers(0, depth + 1, len(slots)))
        certain = np.where(prompt, rng.integers(1, 40, len(slots)), 1)
        accepted = certain + rng.integers(0, drafted + 1)
        model.step(slots, certain + drafted, certain, accepted)
        for slot in slots if rng.random() < 0.3 else ():  # which settles what waits
            model.check(slot)
        chosen = slots[rng.random(len(slots)) < 0.3]
        ends = model.computed[chosen]
        model.backlog.catch_up(chosen, ends - 1)
        assert model.num_counted == model.num_written
        rows = model.backlog.rows_at(chosen, ends - 1)
        features = model.backlog.start(chosen, ends, torch.from_numpy(rows))
        for slot, last in zip(chosen, features.tolist(), strict=True):  # the round itself writes the last token
            model.cache[slot][model.computed[slot] - 1] = tuple(last)
            model.check(slot)
        leaving = np.flatnonzero(rng.random(4) < 0.02)
        model.backlog.forget(leaving)
        for slot in leaving:  # another request takes the slot
            model.cache[slot], model.computed[slot], model.backlog.cached[slot] = {}, 0, 0


def test_rounds_of_others_cost_one_fuse_together(monkeypatch):
    monkeypatch.setattr(backlog, "MAX_UNFUSED", 64)
    model, slots = Model(300, waits=True), np.array([0, 2])
    for _ in range(10):
        model.step(slots, np.array([4, 4]), np.array([1, 1]), np.array([2, 1]))
    assert model.num_fuses == 1 and model.backlog.num_unfused == 16  # eight steps of eight rows had room
    model.backlog.catch_up(slots, model.computed[slots])
    assert model.num_fuses == 2 and model.num_written == 30 and model.backlog.num_unfused == 0
    for slot in slots:
        model.check(slot)


def test_what_nobody_drafts_for_is_never_fused():
    model, slots = Model(300, waits=True), np.array([0, 1, 2])
    prompts = np.array([100, 40, 7])
    model.step(slots, prompts, prompts, prompts)
    model.backlog.forget(np.array([0]))
    model.backlog.catch_up(np.array([1]), model.computed[[1]])
    assert model.num_fuses == 1 and model.num_written == 40 and model.backlog.num_unfused == 7
    model.check(1)
    model.check(2)  # whose turn comes later
    assert model.num_fuses == 2 and not model.backlog.features[:300].any()  # of request 0 nothing was


def test_a_rejected_draft_that_is_kept_for_the_accepted_token_is_seen(monkeypatch):
    unique = np.unique

    def first_of_each(from_the_end, **options):
        places, firsts = unique(from_the_end[::-1], **options)
        return places, len(from_the_end) - 1 - firsts

    model = Model(300, waits=True)
    monkeypatch.setattr(np, "unique", first_of_each)
    for _ in range(2):
        model.step(np.array([1]), np.array([4]), np.array([1]), np.array([2]))
    with pytest.raises(AssertionError):
        model.check(1)


def test_a_wrong_offset_is_seen():
    model = Model(8)
    model.step(np.array([1]), np.array([3]), np.array([3]), np.array([3]))
    model.backlog.features[8:16] = model.backlog.features[8:16].roll(1, 0)
    with pytest.raises(AssertionError):
        model.check(1)


@pytest.mark.parametrize("num_tokens", [1, 3, 256, 300])
def test_locate(num_tokens):
    generator = torch.Generator().manual_seed(num_tokens)
    block_table = torch.randint(0, 9, (5, 12), dtype=torch.int32, generator=generator)
    token_ids = torch.randint(0, 4096, (5, 180), dtype=torch.int32, generator=generator)
    slots = torch.randint(-1, 5, (num_tokens,), generator=generator)
    positions = torch.randint(0, 180, (num_tokens,), generator=generator)
    kv_slots, following = torch.full((2, num_tokens), POISON, dtype=torch.int64)
    locate(
        slots=slots,
        positions=positions,
        block_table=block_table,
        block_size=16,
        all_token_ids=token_ids,
        kv_slots=kv_slots,
        next_tokens=following,
        pad=-1,
    )
    wanted = locate_naive(slots, positions, block_table, 16, token_ids, -1)
    assert torch.equal(kv_slots, wanted[0]) and torch.equal(following, wanted[1])
    if num_tokens > 3:
        assert (kv_slots[slots >= 0] == -1).any() and (kv_slots[slots < 0] == -1).all() and (slots < 0).any()


def test_accepted_lengths():
    idx_mapping = torch.tensor([2, 0, -1], dtype=torch.int32)
    starts = torch.tensor([0, 8, 9, 9], dtype=torch.int32)
    rejected = torch.tensor([5, 0, 0], dtype=torch.int32)
    num_computed = torch.tensor([40, 41, 42], dtype=torch.int32)
    last_rows = torch.full((3,), POISON, dtype=torch.int64)
    computed = torch.full((3,), POISON, dtype=torch.int32)
    accepted_lengths(
        idx_mapping=idx_mapping,
        query_start_loc=starts,
        num_rejected=rejected,
        num_computed=num_computed,
        last_rows=last_rows,
        computed=computed,
    )
    wanted = accepted_lengths_naive(idx_mapping, starts, rejected, num_computed)
    assert torch.equal(last_rows, wanted[0]) and torch.equal(computed, wanted[1])
    assert last_rows.tolist() == [2, 8, 8] and computed.tolist() == [42, 40, 0]


@pytest.mark.parametrize("num_reqs", [1, 3, 130])
def test_last_tokens_of_requests_whose_lengths_the_device_knows(num_reqs):
    generator = torch.Generator().manual_seed(num_reqs)
    accepted = torch.randint(1, 900, (140,), dtype=torch.int32, generator=generator)
    rows = torch.randperm(140, generator=generator)[:num_reqs]
    given = torch.stack([rows, rows + 1, torch.randint(0, 900, (num_reqs,), generator=generator)])
    positions, kept = torch.full((2, num_reqs), POISON, dtype=torch.int64)
    lengths = torch.full((num_reqs,), POISON, dtype=torch.int32)
    last_tokens(given, accepted, positions, kept, lengths)
    assert torch.equal(lengths, accepted[rows]) and torch.equal(positions, accepted[rows].long() - 1)
    assert torch.equal(kept, given[2] + positions)


@pytest.mark.parametrize(("taps", "width", "dtype"), [(1, 7, torch.float32), (3, 1300, torch.bfloat16)])
def test_joined_rows(taps, width, dtype):
    generator = torch.Generator().manual_seed(taps)
    states = [torch.randn(40, width + i, generator=generator).to(dtype)[:, :width] for i in range(taps)]
    rows = torch.randint(0, 40, (17,), generator=generator)
    found = join_rows(states, rows)
    assert torch.equal(found, join_rows_naive(states, rows))
    assert torch.equal(found[3, -width:], states[-1][rows[3]])


COMPILE_FOR_HOPPER = """
import hopper
compiled = hopper.compile_only()
import torch
from vllm_crossspec.catch_up.kernels import accepted_lengths, join_rows, last_tokens, locate

table, token_ids = torch.zeros(8, 64, dtype=torch.int32), torch.zeros(8, 4096, dtype=torch.int32)
last_rows, computed = torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.int32)
for num_tokens in (1, 2, 16, 31, 300, 1024):
    tokens, out = torch.zeros(2, 3, num_tokens, dtype=torch.int64)
    where = {"slots": tokens[0], "positions": tokens[1], "kv_slots": out[0], "next_tokens": out[1]}
    locate(**where, block_table=table, block_size=16, all_token_ids=token_ids, pad=-1)
for num_reqs in (1, 2, 16, 33):
    rows = {"query_start_loc": computed, "num_rejected": computed, "num_computed": computed}
    accepted_lengths(idx_mapping=computed[:num_reqs], **rows, last_rows=last_rows, computed=computed)
    given = torch.zeros(5, num_reqs + num_reqs % 2, dtype=torch.int64)[:, :num_reqs]
    last_tokens(given[:3], computed, given[3], given[4], torch.zeros(num_reqs, dtype=torch.int32))
for num_rows in (1, 2, 16, 33):
    join_rows(list(torch.zeros(3, 64, 256)), last_rows[:num_rows])
found = {name: len(codes) for name, codes in compiled.items()}
names = "locate accepted_lengths last_tokens join_rows"
assert found == {f"_{name}_kernel": 1 for name in names.split()}, compiled
"""


def test_kernels_compile_for_hopper_once(tmp_path):
    compile_in_subprocess(COMPILE_FOR_HOPPER, tmp_path)
