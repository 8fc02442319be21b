"""Attention in float32 for GPUs, against one softmax by definition; on whatever device there is."""

from types import SimpleNamespace

import pytest
import torch
from attention_batches import FORMS, PLAIN, SCALE, Request, Shape, make_batch, masked_softmax, name
from steps import DEVICE

from vllm_crossspec.trees.attention.float32 import exact_attention

SHAPE = Shape(6, 2, 32, torch.float32)
RAGGED = {"decode": ([1, 1, 1], [5, 40, 16]), "mixed": ([8, 1, 20], [68, 34, 20]), "prompt": ([7], [7])}
NO_KEYS = ([61, 61], [0, 70])
"""Of a causal request every row has a key at least: its own."""


def run(query, cache, batch, lengths, form, causal):
    """Output and log-sum-exp of a batch whose last rows may belong to nobody."""
    out, most = torch.full_like(query, torch.nan), int(batch.query_start_loc.diff().max())
    return out, exact_attention(query, cache, out, batch, lengths, most, form, causal)


@pytest.mark.parametrize("form", [PLAIN, *FORMS[1:]], ids=name)
@pytest.mark.parametrize(
    ("query_lens", "lengths", "causal"),
    [
        *(pytest.param(*sizes, causal, id=f"{n}-{causal}") for n, sizes in RAGGED.items() for causal in (False, True)),
        pytest.param(*NO_KEYS, False, id="empty-False"),
    ],
)
def test_every_row_attends_to_its_keys(query_lens, lengths, causal, form):
    """Unused slots of the cache hold NaN, and unused entries of block tables are out of range."""
    sizes = zip(query_lens, lengths, strict=True)
    requests = [Request(length - count, count, None) if length else Request(0, count, None) for count, length in sizes]
    batch = make_batch(SHAPE, requests, seed=11)
    table = batch.block_table.clone()
    for line, length in zip(table, lengths, strict=True):
        line[-(-length // 32) :] = 10_000
    metadata = SimpleNamespace(
        query_start_loc=batch.query_start_loc.to(DEVICE), block_table=table.to(DEVICE), max_seq_len=max(lengths) + 3
    )
    on_device = form._replace(sinks=None if form.sinks is None else form.sinks.to(DEVICE))
    counts = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    out, lse = run(batch.query.to(DEVICE), batch.cache.to(DEVICE), metadata, counts, on_device, causal)
    for index, (first, last, length) in enumerate(
        zip(batch.query_start_loc.tolist(), batch.query_start_loc[1:].tolist(), lengths, strict=False)
    ):
        away = torch.arange(length - (last - first), length)[:, None] - torch.arange(length)
        mask = (away >= 0) if causal else torch.ones_like(away, dtype=torch.bool)
        if form.window:
            mask &= away.abs() < form.window
        query, content = batch.query[first:last], batch.dense[index][:length]
        whole = masked_softmax(query, content, mask, form)
        torch.testing.assert_close(out[first:last].cpu().double(), whole.nan_to_num(), atol=2e-6, rtol=1e-5)
        if form == PLAIN:
            keys = content[:, 0].double().repeat_interleave(3, 1)
            scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * SCALE
            wanted = scores.masked_fill(~mask, -torch.inf).logsumexp(-1)
            torch.testing.assert_close(lse[:, first:last].cpu().double(), wanted, atol=2e-6, rtol=1e-6)
    assert lse.isfinite().all() or 0 in lengths


def test_the_padding_of_a_graph_is_harmless():
    """Requests of no rows and no keys at the end of the batch, and rows that belong to nobody."""
    batch = make_batch(SHAPE, [Request(17, 3, None), Request(6, 3, None)], seed=7)
    pad = torch.nn.functional.pad
    cache, table = batch.cache.to(DEVICE), batch.block_table.to(DEVICE)
    starts, lengths = batch.query_start_loc.to(DEVICE), batch.seq_lens.to(DEVICE)
    query = batch.query.to(DEVICE)
    alone = SimpleNamespace(query_start_loc=starts, block_table=table, max_seq_len=64)
    padded = SimpleNamespace(
        query_start_loc=torch.cat([starts, starts[-1:].repeat(2)]), block_table=pad(table, (0, 0, 0, 2)), max_seq_len=64
    )
    whole, _ = run(query, cache, alone, lengths, PLAIN, True)
    found, _ = run(pad(query, (0, 0, 0, 0, 0, 6)), cache, padded, pad(lengths, (0, 2)), PLAIN, True)
    assert torch.equal(found[:6], whole)
