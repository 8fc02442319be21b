"""Made-up batches for the tests of tree attention: a paged cache, trees, and the same keys laid out densely."""

import random
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from vllm_crossspec.engine.attention.base import TargetTail
from vllm_crossspec.verify.naive import ancestors_of, pack_bits
from vllm_crossspec.verify.tail_attention import Softmax

BLOCK_SIZE = 32
MAX_BLOCKS = 12


class Shape(NamedTuple):
    """Of the attention."""

    heads: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype


class Request(NamedTuple):
    """One request: dense tokens before its query rows, and the parents of its drafts (None: a chunk of a prompt).

    The second half of the rows of one that ``contemplates`` sees the soft prompts.
    """

    prefix: int
    rows: int
    parents: list[int] | None
    contemplates: bool = False

    @property
    def ordinary(self) -> int:
        """Rows that are no contemplate rows."""
        return self.rows // 2 if self.contemplates else self.rows


class Batch(NamedTuple):
    """A batch as vLLM would hand it over. The cache is NaN wherever no token was written."""

    shape: Shape
    requests: list[Request]
    query: torch.Tensor  # [T, Hq, Dh]
    dense: list[torch.Tensor]  # per request [tokens, 2, Hkv, Dh]
    cache: torch.Tensor  # [blocks, Hkv, BLOCK_SIZE, 2 * Dh]
    block_table: torch.Tensor  # int32 [R, MAX_BLOCKS]
    query_start_loc: torch.Tensor  # int32 [R + 1]
    seq_lens: torch.Tensor  # int32 [R]
    tail: TargetTail
    soft: torch.Tensor | None = None  # [2, Hkv, s, Dh]

    def common(self, causal: Any = True) -> Any:
        """What the metadata builders read of vLLM's common metadata."""
        return SimpleNamespace(
            num_actual_tokens=self.query.shape[0],
            num_reqs=len(self.requests),
            max_query_len=max(r.rows for r in self.requests),
            max_seq_len=int(self.seq_lens.max()),
            query_start_loc=self.query_start_loc,
            query_start_loc_cpu=self.query_start_loc,
            seq_lens=self.seq_lens,
            block_table_tensor=self.block_table,
            slot_mapping=torch.zeros(self.query.shape[0], dtype=torch.int64),
            causal=causal,
            mm_req_doc_ranges=None,
            rswa_prefix_lens=None,
        )


def random_parents(rng: random.Random, num_nodes: int) -> list[int]:
    """Parent rows of a random tree, parents first."""
    return [rng.randint(max(0, row - 6), row) for row in range(num_nodes)]


def verification(rng: random.Random, prefix: int, num_nodes: int) -> Request:
    """A request that verifies a random tree."""
    return Request(prefix, num_nodes + 1, random_parents(rng, num_nodes))


def contemplating(request: Request) -> Request:
    """The same tree with a contemplate row behind each of its rows: to the masks, children that come last."""
    assert request.parents is not None
    return Request(request.prefix, 2 * request.rows, request.parents + list(range(request.rows)), True)


def sees(request: Request, row: int, key: int) -> bool:
    """Whether a query row sees a token, straight from the definition."""
    if key < request.prefix:
        return True
    other = key - request.prefix
    if request.parents is None:
        return other <= row
    return other == row or other in ancestors_of(row, request.parents)


def depth_of(request: Request, row: int) -> int:
    """Tokens between a row and the first row of its request."""
    return row if request.parents is None else len(ancestors_of(row, request.parents))


def visible(request: Request, window: int = 0) -> torch.Tensor:
    """Bools [rows, tokens]; with a window, of what is less than so many positions away."""
    places = [*range(request.prefix), *(request.prefix + depth_of(request, row) for row in range(request.rows))]
    return torch.tensor(
        [
            [sees(request, row, key) and not 0 < window <= places[request.prefix + row] - place
             for key, place in enumerate(places)]
            for row in range(request.rows)
        ]
    )  # fmt: skip


def make_batch(
    shape: Shape, requests: list[Request], seed: int, num_words: int | None = None, num_soft: int = 0
) -> Batch:
    """Random numbers for these requests; those with trees come first."""
    generator = torch.Generator().manual_seed(seed)
    num_split = sum(r.parents is not None for r in requests)
    assert all(r.parents is not None for r in requests[:num_split])
    num_blocks = len(requests) * MAX_BLOCKS
    order = torch.randperm(num_blocks, generator=generator).to(torch.int32)
    block_table = order.reshape(len(requests), MAX_BLOCKS)
    cache = torch.full((num_blocks, shape.kv_heads, BLOCK_SIZE, 2 * shape.head_size), torch.nan, dtype=shape.dtype)
    dense = []
    for request, blocks in zip(requests, block_table.long(), strict=True):
        tokens = request.prefix + request.rows
        content = torch.randn(tokens, 2, shape.kv_heads, shape.head_size, generator=generator).to(shape.dtype)
        place = torch.arange(tokens)
        cache[blocks[place // BLOCK_SIZE], :, place % BLOCK_SIZE] = content.transpose(1, 2).flatten(2)
        dense.append(content)
    rows = torch.tensor([r.rows for r in requests])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)]).to(torch.int32)
    query = torch.randn(int(starts[-1]), shape.heads, shape.head_size, generator=generator).to(shape.dtype)
    longest = max([r.rows for r in requests[:num_split]], default=1)
    num_words = num_words or -(-longest // 32)
    # Whatever the rows of prompts hold is not to be read.
    all_words = num_words + -(-num_soft // 32)
    row_mask = torch.full((query.shape[0], all_words), -7777, dtype=torch.int32)
    for request, start in zip(requests[:num_split], starts.tolist(), strict=False):
        bits = torch.zeros(request.rows, 32 * all_words, dtype=torch.bool)
        bits[:, : request.rows] = visible(request)[:, request.prefix :]
        bits[request.ordinary :, 32 * num_words : 32 * num_words + num_soft] = True
        row_mask[start : start + request.rows] = pack_bits(bits)
    lengths = torch.tensor([r.prefix + r.rows for r in requests], dtype=torch.int32)
    tail = TargetTail(
        prefix_len=torch.tensor([r.prefix for r in requests[:num_split]] + [-7777] * 3, dtype=torch.int32),
        row_mask=row_mask,
        num_reqs=num_split,
        num_tokens=int(starts[num_split]),
        max_query_len=longest,
        is_whole_batch=num_split == len(requests),
    )
    soft = None
    if num_soft:
        soft = torch.randn(2, shape.kv_heads, num_soft, shape.head_size, generator=generator).to(shape.dtype)
    return Batch(shape, requests, query, dense, cache, block_table, starts, lengths, tail, soft)


def as_on_a_cpu(cache: torch.Tensor) -> torch.Tensor:
    """A cache as vLLM's kernel for CPUs has it: keys by dimension, then values. Where nothing was written are numbers.

    That kernel multiplies them with zero, and vLLM's memory holds numbers.
    """
    from vllm_crossspec.engine.attention.cpu import TreeCpuImpl

    found = torch.empty_like(cache)
    for view, part in zip(TreeCpuImpl.kv_views(found), cache.nan_to_num(nan=-7777.0).chunk(2, dim=-1), strict=True):
        view.copy_(part)
    return found


def ordinary_rows(batch: Batch) -> torch.Tensor:
    """int64 token rows of a batch that are no contemplate rows."""
    starts = batch.query_start_loc.tolist()
    return torch.cat([start + torch.arange(r.ordinary) for r, start in zip(batch.requests, starts, strict=False)])


def without_contemplation(batch: Batch) -> Batch:
    """The batch as it would be without its contemplate rows and soft prompts, in the same cache."""
    requests = [
        Request(r.prefix, r.ordinary, r.parents[: r.ordinary - 1] if r.contemplates and r.parents else r.parents)
        for r in batch.requests
    ]
    rows, counts = ordinary_rows(batch), torch.tensor([r.rows for r in requests])
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
    longest = max(r.rows for r in requests[: batch.tail.num_reqs])
    return batch._replace(
        requests=requests,
        query=batch.query[rows],
        dense=[content[: r.prefix + r.rows] for r, content in zip(requests, batch.dense, strict=True)],
        query_start_loc=starts,
        seq_lens=torch.tensor([r.prefix + r.rows for r in requests], dtype=torch.int32),
        tail=batch.tail._replace(
            row_mask=batch.tail.row_mask[rows, : -(-longest // 32)].contiguous(),
            num_tokens=int(starts[batch.tail.num_reqs]),
            max_query_len=longest,
        ),
        soft=None,
    )


def masked_softmax(
    query: torch.Tensor, content: torch.Tensor, mask: torch.Tensor, softmax: Softmax | float
) -> torch.Tensor:
    """Attention of one request, head by head, in float64.

    Args:
        query: [rows, Hq, Dh].
        content: [tokens, 2, Hkv, Dh].
        mask: bools [rows, tokens].
        softmax: of the layer, or the scale of its logits; the mask knows the window.
    """
    if not isinstance(softmax, Softmax):
        softmax = Softmax(softmax)
    out = torch.empty(query.shape, dtype=torch.float64)
    group = query.shape[1] // content.shape[2]
    for head in range(query.shape[1]):
        keys, values = content[:, :, head // group].double().unbind(1)
        logits = query[:, head].double() @ keys.T * softmax.scale
        if softmax.soft_cap:
            logits = softmax.soft_cap * torch.tanh(logits / softmax.soft_cap)
        sink = -torch.inf if softmax.sinks is None else float(softmax.sinks[head])
        with_sink = torch.nn.functional.pad(logits.masked_fill(~mask, -torch.inf), (0, 1), value=sink)
        out[:, head] = torch.softmax(with_sink, dim=-1)[:, :-1] @ values
    return out


def expected(batch: Batch, softmax: Softmax | float, plain: bool = False) -> torch.Tensor:
    """Of the whole batch; ``plain`` forgets the trees, as a drafter's layer does."""
    rows = []
    for request, content, start in zip(batch.requests, batch.dense, batch.query_start_loc.tolist(), strict=False):
        window = softmax.window if isinstance(softmax, Softmax) else 0
        mask = visible(request._replace(parents=None) if plain else request, window)
        if batch.soft is not None and not plain:
            content = torch.cat([content, batch.soft.permute(2, 0, 1, 3)])
            sees_soft = (torch.arange(request.rows) >= request.ordinary)[:, None]
            mask = torch.cat([mask, sees_soft.expand(-1, batch.soft.shape[2])], dim=1)
        rows.append(masked_softmax(batch.query[start : start + request.rows], content, mask, softmax))
    return torch.cat(rows)
