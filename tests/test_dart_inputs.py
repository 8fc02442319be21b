"""The rows of DART's forward: kernels against their plain twins, over odd shapes, into poisoned buffers."""

import pytest
import torch
from steps import DEVICE, step_inputs

from vllm_crossspec.drafters.dart import inputs, naive
from vllm_crossspec.ngram_store.contexts import Texts, last_tokens
from vllm_crossspec.ngram_store.naive import last_tokens_naive

BLOCK_SIZE = 4


def poisoned(num_slots, num_targets, num_queries, capacity):
    """Buffers full of what nobody should find there."""

    def full(size, dtype=torch.int64):
        return torch.full((size,), -777, dtype=dtype, device=DEVICE)

    rows = num_slots * num_queries
    return inputs.DartRows(
        context_positions=full(num_targets),
        context_tokens=full(num_targets),
        context_slots=full(num_targets),
        entry_rows=full(num_slots),
        entry_tokens=full(num_slots),
        positions=full(capacity),
        slots=full(capacity),
        query_start_loc=full(num_slots + 1, torch.int32),
        seq_lens=full(num_slots, torch.int32),
        predicted_positions=full(rows),
        request_slots=full(rows),
        temperature=full(num_slots, torch.float32),
        seeds=full(num_slots),
    )


def batch(generator, num_reqs, num_slots, longest, max_model_len):
    """A step of ``num_reqs`` requests: some inside their prompts, some with rejected rows, one near the end."""

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    lengths = draw(1, longest + 1, num_reqs)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32)
    rejected = (torch.rand(num_reqs, generator=generator) * lengths).long().to(torch.int32)
    firsts = draw(0, max_model_len - longest, num_reqs)
    if num_reqs:
        firsts[-1] = max_model_len - lengths[-1]
    positions = torch.cat([first + torch.arange(n) for first, n in zip(firsts, lengths, strict=True)])
    num_blocks = -(-max_model_len // BLOCK_SIZE)
    table = draw(1, 90, num_slots, num_blocks).to(torch.int32)
    table[draw(0, 2, num_slots, num_blocks) * draw(0, 2, num_slots, num_blocks) == 1] = 0
    step = step_inputs(
        input_ids=draw(0, 500, len(positions)).to(torch.int32),
        positions=positions,
        query_start_loc=starts,
        idx_mapping=torch.randperm(num_slots, generator=generator)[:num_reqs].to(torch.int32),
        num_sampled=draw(0, 2, num_reqs).to(torch.int32),
        num_rejected=rejected,
        last_sampled=draw(0, 500, num_slots),
        next_prefill_tokens=draw(0, 500, 1, num_slots).to(torch.int32),
        temperature=torch.rand(num_slots, generator=generator),
        seeds=draw(0, 1 << 40, num_slots),
    )
    return step, {"block_table": table.to(DEVICE), "block_size": BLOCK_SIZE, "max_model_len": max_model_len}


@pytest.mark.parametrize("takes_last", [False, True])
@pytest.mark.parametrize(
    ("num_reqs", "num_slots", "longest", "num_queries", "short"),
    [(1, 1, 1, 1, 0), (1, 3, 5, 8, 0), (4, 4, 1, 7, 0), (3, 5, 9, 2, 0), (5, 6, 300, 8, 0), (2, 5, 3, 4, 9)],
)
def test_rows_are_the_twins(num_reqs, num_slots, longest, num_queries, short, takes_last):
    generator = torch.Generator().manual_seed(num_reqs * 100 + longest)
    step, cache = batch(generator, num_reqs, num_slots, longest, max_model_len=longest + 21)
    capacity = num_slots * num_queries - short
    found, wanted = (poisoned(num_slots, len(step.batch.positions), num_queries, capacity) for _ in range(2))
    common = cache | {"num_queries": num_queries, "takes_last": takes_last, "kept": 0}
    inputs.prepare_rows(step, **common, out=found)
    naive.prepare_rows(step, **common, out=wanted)
    for name, mine, theirs in zip(inputs.DartRows._fields, found, wanted, strict=True):
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize(("width", "kept"), [(61, 9), (5, 5), (70, 66), (2, 1)])
def test_rows_that_are_kept_are_the_twins(width, kept):
    """A verification of trees: rows enough, of which only the first can have been accepted."""
    generator = torch.Generator().manual_seed(width)
    step, cache = batch(generator, 4, 6, width, max_model_len=width + 40)
    step.batch.query_start_loc = torch.arange(5, dtype=torch.int32, device=DEVICE) * width
    step.batch.num_scheduled_tokens = torch.full((4,), width)
    step.batch.positions = (torch.arange(4)[:, None] * 3 + torch.arange(width)).flatten().to(DEVICE)
    step.batch.input_ids = torch.randint(0, 500, (4 * width,), generator=generator).to(DEVICE, torch.int32)
    accepted = torch.randint(1, kept + 1, (4,), generator=generator)
    step = step._replace(num_rejected=(width - accepted).to(DEVICE, torch.int32))
    found, wanted = (poisoned(6, 4 * width, 8, 48) for _ in range(2))
    common = cache | {"num_queries": 8, "takes_last": False, "kept": kept}
    inputs.prepare_rows(step, **common, out=found)
    naive.prepare_rows(step, **common, out=wanted)
    for name, mine, theirs in zip(inputs.DartRows._fields, found, wanted, strict=True):
        assert torch.equal(mine, theirs), name
    assert found.entry_rows[:4].tolist() == [kept * i + int(n) - 1 for i, n in enumerate(accepted)]
    assert (found.context_slots[: 4 * kept] != -777).all() and (found.context_slots[4 * kept :] == -777).all()


def test_every_row_has_its_place():
    """By hand: two requests, of which the second is inside its prompt, blocks of 4."""
    out = poisoned(3, 6, 3, 9)
    step = step_inputs(
        input_ids=torch.tensor([10, 11, 12, 13, 20, 21], dtype=torch.int32),
        positions=torch.tensor([5, 6, 7, 8, 0, 1]),
        query_start_loc=torch.tensor([0, 4, 6], dtype=torch.int32),
        idx_mapping=torch.tensor([2, 0], dtype=torch.int32),
        num_sampled=torch.tensor([2, 0], dtype=torch.int32),
        num_rejected=torch.tensor([2, 0], dtype=torch.int32),
        last_sampled=torch.tensor([0, 0, 99]),
        next_prefill_tokens=torch.tensor([22, 0, 0], dtype=torch.int32),
        temperature=torch.zeros(3),
        seeds=torch.zeros(3, dtype=torch.int64),
    )
    inputs.prepare_rows(
        step,
        block_table=torch.tensor([[5, 6, 7], [8, 9, 0]], dtype=torch.int32, device=DEVICE),
        block_size=4,
        num_queries=3,
        max_model_len=12,
        takes_last=False,
        kept=0,
        out=out,
    )
    # Entry 5 is context, entry 6 the last one, rows 2 and 3 were rejected; the token after entry 6 is the sampled one.
    assert out.context_slots.tolist() == [6 * 4 + 1, -1, -1, -1, 8 * 4, -1]
    assert out.context_tokens.tolist() == [11, 99, 0, 0, 21, 22]
    assert out.entry_rows.tolist() == [1, 5, 0]
    assert out.entry_tokens.tolist() == [99, 22, 0]
    assert out.positions.tolist() == [6, 7, 8, 1, 2, 3, 0, 0, 0]
    assert out.slots.tolist() == [26, 27, 28, 33, 34, 35, -1, -1, -1]
    assert out.predicted_positions.tolist() == [8, 9, 10, 3, 4, 5, 0, 0, 0]
    assert out.seq_lens.tolist() == [9, 4, 0]
    assert out.query_start_loc.tolist() == [0, 3, 6, 6]


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_contexts_are_the_twins(width):
    generator = torch.Generator().manual_seed(width)
    all_token_ids = torch.randint(0, 500, (6, 30), generator=generator).to(DEVICE, torch.int32)
    num_computed = torch.tensor([0, 1, 2, 17, 29, 40], dtype=torch.int32, device=DEVICE)
    idx_mapping = torch.tensor([3, 0, -1, 5, 1, 2, 4], dtype=torch.int32, device=DEVICE)
    found = torch.full((7, width), -777, device=DEVICE)
    texts = Texts(idx_mapping, num_computed, all_token_ids)
    last_tokens(texts, found)
    assert torch.equal(found, last_tokens_naive(texts, width))
    assert found[0].tolist() == all_token_ids[3, 18 - width : 18].tolist()
