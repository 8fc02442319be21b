"""Attention in float32 for GPUs, against a loop over requests and rows; on whatever device there is."""

import pytest
import torch

from vllm_crossspec.engine.attention.exact import exact_attention
from vllm_crossspec.verify.tail_attention import Softmax

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, KV_HEADS, HEAD, BLOCK = 6, 2, 16, 16


def ragged_batch(query_lens: list[int], lengths: list[int], padding: int = 0) -> dict[str, torch.Tensor]:
    """A batch over a cache whose unused slots hold NaN, and block tables whose unused entries are out of range."""
    random = torch.Generator().manual_seed(7)
    blocks_of = [-(-n // BLOCK) for n in lengths]
    cache = torch.full((sum(blocks_of) + 2, BLOCK, KV_HEADS, 2 * HEAD), float("nan"))
    table = torch.full((len(lengths), max(blocks_of, default=0) + 1), 10_000, dtype=torch.int32)
    free = (torch.randperm(sum(blocks_of), generator=random) + 1).tolist()
    for r, (count, length) in enumerate(zip(blocks_of, lengths, strict=True)):
        for b in range(count):
            table[r, b] = block = free.pop()
            used = min(BLOCK, length - b * BLOCK)
            cache[block, :used] = torch.randn(used, KV_HEADS, 2 * HEAD, generator=random)
    keys, values = cache.to(DEVICE).split(HEAD, dim=-1)
    rows = sum(query_lens)
    return {
        "query": torch.randn(rows + padding, HEADS, HEAD, generator=random).to(DEVICE),
        "keys": keys,
        "values": values,
        "out": torch.full((rows + padding, HEADS, HEAD), float("nan"), device=DEVICE),
        "query_start_loc": torch.tensor([0, *query_lens]).cumsum(0).int().to(DEVICE),
        "lengths": torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        "block_table": table.to(DEVICE),
    }


RAGGED = {"decode": ([1, 1, 1], [5, 40, 16]), "mixed": ([9, 1, 4], [9, 33, 20]), "prompt": ([7], [7])}
NO_KEYS = ([61, 61], [0, 70])
"""Of a causal request every row has a key at least: its own."""


@pytest.mark.parametrize(
    ("query_lens", "lengths", "causal"),
    [
        *(
            pytest.param(*sizes, causal, id=f"{name}-{causal}")
            for name, sizes in RAGGED.items()
            for causal in (False, True)
        ),
        pytest.param(*NO_KEYS, False, id="empty-False"),
    ],
)
def test_every_row_attends_to_its_keys(query_lens, lengths, causal):
    batch = ragged_batch(query_lens, lengths)
    sizes = {"max_query_len": max(query_lens), "max_length": max(lengths) + 3, "softmax": Softmax(0.3)}
    lse = exact_attention(**batch, **sizes, causal=causal)
    first = 0
    for r, (count, length) in enumerate(zip(query_lens, lengths, strict=True)):
        blocks = batch["block_table"][r, : -(-length // BLOCK)].long()
        keys, values = (batch[n][blocks].flatten(0, 1)[:length].double() for n in ("keys", "values"))
        for i in range(count):
            seen = length - count + i + 1 if causal else length
            for head in range(HEADS):
                kv = head // (HEADS // KV_HEADS)
                scores = keys[:seen, kv] @ batch["query"][first + i, head].double() * 0.3
                expected = scores.softmax(0) @ values[:seen, kv]
                torch.testing.assert_close(batch["out"][first + i, head].double(), expected, atol=2e-6, rtol=1e-5)
                torch.testing.assert_close(lse[head, first + i].double(), scores.logsumexp(0), atol=2e-6, rtol=1e-6)
        first += count


def test_the_padding_of_a_graph_is_harmless():
    """Requests of no rows and no keys at the end of the batch, and rows that belong to nobody."""
    batch, alone = ragged_batch([3, 3, 0, 0], [20, 9, 0, 0], padding=6), ragged_batch([3, 3], [20, 9])
    for given in (batch, alone):
        exact_attention(**given, max_query_len=3, max_length=64, softmax=Softmax(1.0), causal=True)
    again = dict(alone, query=batch["query"][:6].clone(), keys=batch["keys"], values=batch["values"])
    again["block_table"] = batch["block_table"][:2]
    exact_attention(**again, max_query_len=3, max_length=64, softmax=Softmax(1.0), causal=True)
    assert torch.equal(batch["out"][:6], again["out"])
