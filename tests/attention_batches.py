"""Made-up batches for the tests of tree attention, what is right of them by definition, and the ways to compute it."""

import random
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from crossspec_cpu_lane.vllm import attention as cpu
from crossspec_cpu_lane.vllm.attention import TreeCpuBackend, TreeCpuImpl, TreeCpuMetadata
from steps import DEVICE, KINDS, Step, make_step, prepare
from two_passes import in_two_passes
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from vllm_crossspec.trees.attention.base import DraftTail, TargetTail
from vllm_crossspec.trees.verify import naive
from vllm_crossspec.trees.verify.naive import ancestors_of, pack_bits
from vllm_crossspec.trees.verify.tail_attention import PagedTail, QueryRows, Scales, Softmax, soft_words
from vllm_crossspec.types import FLOAT8

BLOCK_SIZE = 32
MAX_BLOCKS = 12
SCALE = 0.21
PLAIN = Softmax(SCALE)
SINKS = torch.tensor([1.5, -2.0, 0.0, 4.0, -0.5, 2.5])
FORMS = [
    Softmax(SCALE, window=1),
    Softmax(SCALE, window=3),
    Softmax(SCALE, window=24),
    Softmax(SCALE, window=BLOCK_SIZE + 1, sinks=SINKS),
    Softmax(SCALE, window=500, soft_cap=1.5),
    Softmax(SCALE, sinks=SINKS),
    Softmax(SCALE, soft_cap=0.7),
    Softmax(SCALE, window=40, soft_cap=2.0, sinks=SINKS),
]


def name(form: Softmax) -> str:
    """Of a layer's form, for a test's."""
    parts = (f"window{form.window}" * bool(form.window), f"cap{form.soft_cap}" * bool(form.soft_cap))
    return "-".join(part for part in (*parts, "sinks" * (form.sinks is not None)) if part) or "plain"


def wrong_forms(form: Softmax, longest: int) -> list[Softmax]:
    """Wrong variants of a batch, each with one difference that shows within so many tokens."""
    found = [form._replace(window=form.window + i) for i in (1, -1)] if 1 < form.window < longest - 1 else []
    found += [form._replace(window=2)] if form.window == 1 else []
    if form.sinks is not None:
        twice = form.sinks + torch.log(torch.tensor(2.0))
        found += [form._replace(sinks=None), form._replace(sinks=twice)]
    return found + ([form._replace(soft_cap=0.0)] if form.soft_cap else [])


def wrong_scales(scales: Scales) -> list[Scales]:
    """The same with one scale wrong."""
    return [scales._replace(**{n: 1.5 * scale}) for n, scale in scales._asdict().items() if scale is not None]


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
    query: torch.Tensor, content: torch.Tensor, mask: torch.Tensor, softmax: Softmax = PLAIN
) -> torch.Tensor:
    """Attention of one request, head by head, in float64.

    Args:
        query: [rows, Hq, Dh].
        content: [tokens, 2, Hkv, Dh].
        mask: bools [rows, tokens].
        softmax: of the layer; the mask knows the window.
    """
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


def expected(batch: Batch, softmax: Softmax = PLAIN, plain: bool = False) -> torch.Tensor:
    """Of the whole batch; ``plain`` forgets the trees, as a drafter's layer does."""
    rows = []
    for request, content, start in zip(batch.requests, batch.dense, batch.query_start_loc.tolist(), strict=False):
        mask = visible(request._replace(parents=None) if plain else request, softmax.window)
        if batch.soft is not None and not plain:
            content = torch.cat([content, batch.soft.permute(2, 0, 1, 3)])
            sees_soft = (torch.arange(request.rows) >= request.ordinary)[:, None]
            mask = torch.cat([mask, sees_soft.expand(-1, batch.soft.shape[2])], dim=1)
        rows.append(masked_softmax(batch.query[start : start + request.rows], content, mask, softmax))
    return torch.cat(rows)


def mixed(seed: int) -> list[Request]:
    """Trees, a request without drafts, a placeholder chain and two chunks of prompts."""
    rng = random.Random(seed)
    return [
        verification(rng, 70, 13),
        verification(rng, BLOCK_SIZE, 31),
        verification(rng, 1, 5),
        Request(45, 1, []),
        Request(9, 8, list(range(7))),
        Request(0, 37, None),
        Request(64, 3, None),
    ]


# -- backends ---------------------------------------------------------------------------------------------------------

TARGET, DRAFTER = SimpleNamespace(is_draft_layer=False), SimpleNamespace(is_draft_layer=True)
WAYS = ["lane", "torch", "two-passes"]


def take_way(request, monkeypatch):
    """A fixture: the CPU backend by the lane's products or PyTorch's, or the GPU's algorithm in its place."""
    if request.param == "torch":
        monkeypatch.setattr(cpu, "lane_ops", lambda: None)
    if request.param == "two-passes":
        monkeypatch.setattr(TreeCpuImpl, "forward", in_two_passes(TreeCpuImpl.forward))


class Layer(AttentionLayerBase):
    """Of a model: what builders, backends and refusals look at."""

    def __init__(self, is_draft_layer=False, impl=None, backend=TreeCpuBackend, scales=None):
        self.is_draft_layer, self.impl, self.backend = is_draft_layer, impl, backend
        self._q_scale, self._k_scale, self._v_scale = scales or [torch.ones(1)] * 3
        self._k_scale_float, self._v_scale_float = float(self._k_scale), float(self._v_scale)

    def get_attn_backend(self):
        return self.backend

    def get_kv_cache_spec(self, vllm_config):
        return None


def options(form: Softmax) -> dict[str, Any]:
    """What an implementation of vLLM's is built with."""
    return {"sliding_window": form.window or None, "logits_soft_cap": form.soft_cap or None, "sinks": form.sinks}


def implementation(shape: Shape, **given) -> TreeCpuImpl:
    return TreeCpuImpl(shape.heads, shape.head_size, SCALE, shape.kv_heads, **given)


def metadata_of(batch: Batch, **changes) -> TreeCpuMetadata:
    common = vars(batch.common())
    fields = {n: common[n] for n in TreeCpuMetadata.__dataclass_fields__ if n in common}
    return TreeCpuMetadata(**(fields | {"block_table": batch.block_table, "target_tail": batch.tail} | changes))


def attend(batch: Batch, layer=TARGET, impl=None, **changes) -> torch.Tensor:
    """Run a layer; the output and the rows that it is not to read begin as NaN."""
    poison = torch.full_like(batch.query, torch.nan)
    impl = impl or implementation(batch.shape)
    cache, metadata = as_on_a_cpu(batch.cache), metadata_of(batch, **changes)
    out = impl.forward(layer, batch.query, poison, poison, cache, metadata, poison.clone())
    assert out.isfinite().all()
    return out


def config(layers, **parallel):
    sizes = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        parallel_config=SimpleNamespace(**(sizes | parallel)),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
    )


def quantised_batch(
    batch: Batch, kind: str, layer: Layer, query_scale: torch.Tensor | None = None
) -> tuple[Batch, Batch]:
    """The batch with a cache in float8, queries too if they have a scale; and the same as the numbers are."""
    size, dtype = batch.shape.head_size, FLOAT8[kind]
    of = torch.cat([layer._k_scale.expand(size), layer._v_scale.expand(size)])
    most = torch.finfo(dtype).max
    cache, by_part = (batch.cache / of).clamp(-most, most).to(dtype), of.view(2, 1, size)
    numbers = [(x / by_part).clamp(-most, most).to(dtype).float() * by_part for x in batch.dense]
    exact, query = batch._replace(dense=numbers), batch.query
    if query_scale is not None:
        query = (query / query_scale).to(torch.float8_e4m3fn)
        exact = exact._replace(query=query.float() * query_scale)
    return batch._replace(cache=cache, query=query), exact


class Trees(NamedTuple):
    """Drafters' trees that grow level by level, the same width in each."""

    parents: list[list[int]]  # of each request's nodes; -1 for the root's children
    width: int
    extra: int  # shared entries: one or none

    def grow(self, rng: random.Random) -> None:
        """One level more, its nodes below random ones of the level before."""
        for tree in self.parents:
            first = len(tree)
            tree += [rng.randrange(first - self.width, first) if first else -1 for _ in range(self.width)]

    def seen(self) -> torch.Tensor:
        """Bools [R, queries, 32] of the last level: the shared entry and each node's line."""
        found = torch.zeros(len(self.parents), self.width + self.extra, 32, dtype=torch.bool)
        found[..., : self.extra] = True
        for request, tree in enumerate(self.parents):
            for beam in range(self.width):
                node = len(tree) - self.width + beam
                while node >= 0:
                    found[request, beam, self.extra + node] = True
                    node = tree[node]
        return found


def draft_tail(scratch: torch.Tensor, seen: torch.Tensor, length: int, has_shared: bool = False) -> DraftTail:
    """A level whose rows see of the scratch what ``seen``, bools [R, queries, 32 * W], says."""
    lengths = torch.tensor([length], dtype=torch.int32)
    return DraftTail(scratch, pack_bits(seen.flatten(0, 1)), lengths, *seen.shape[:2], has_shared)


def starts_of(num_reqs: int, queries: int) -> torch.Tensor:
    return torch.arange(0, num_reqs * queries + 1, queries, dtype=torch.int32)


# -- kernels ----------------------------------------------------------------------------------------------------------


class Attention(NamedTuple):
    """What a step's attention works on: the cache's rows lie inside a larger buffer of NaN."""

    query: torch.Tensor
    cache: torch.Tensor
    block_table: torch.Tensor
    prefix_len: torch.Tensor
    row_mask: torch.Tensor
    step: Step
    scale: float
    soft: torch.Tensor | None


def fenced(shape, dtype, generator):
    """Random numbers with NaN on both sides, so that a read out of bounds is seen."""
    buffer = torch.full((shape[0] + 2, *shape[1:]), float("nan"), dtype=dtype, device=DEVICE)
    buffer[1:-1] = torch.randn(shape, generator=generator).to(DEVICE, dtype)
    return buffer[1:-1]


def make_attention(
    seed, num_nodes, head_size, group, block_size, dtype, prefix=None, kv_heads=2, kinds=tuple(KINDS), num_soft=0
):
    """Contemplate rows are among the rows where there are soft prompts."""
    contemplates = num_soft > 0
    step = make_step(seed, num_nodes, min(num_nodes, 9), kinds, prefix=prefix, contemplates=contemplates)
    generator = torch.Generator().manual_seed(seed)
    prepared = prepare(naive, step, min(num_nodes, 9), contemplates=contemplates, num_soft=num_soft)
    num_reqs, num_rows = step.idx_mapping.shape[0], step.positions.shape[0]
    width = -(-int(step.seq_lens.max()) // block_size) + 1
    blocks = num_reqs * width
    table = torch.randperm(blocks, generator=generator).view(num_reqs, width).to(DEVICE, torch.int32)
    query = torch.randn(num_rows, kv_heads * group, head_size, generator=generator).to(DEVICE, dtype)
    cache = fenced((blocks, kv_heads, block_size, 2 * head_size), dtype, generator)
    if seed % 2:
        cache = fenced((blocks, block_size, kv_heads, 2 * head_size), dtype, generator).transpose(1, 2)
    soft = fenced((2, kv_heads, num_soft, head_size), dtype, generator) if num_soft else None
    return Attention(query, cache, table, prepared["prefix_len"], prepared["row_mask"], step, head_size**-0.5, soft)


def softmax_attention(query, keys, values, seen, scale):
    """Plain masked attention in float64: output [q, Hq, D] and log-sum-exp [Hq, q]."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * scale
    scores = scores.masked_fill(~seen, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values), scores.logsumexp(-1)


def whole_and_prefix(case):
    """Attention over prefix and tail in one softmax; output and log-sum-exp of the prefix alone."""
    step, num_rows = case.step, case.query.shape[0]
    whole = torch.full(case.query.shape, float("nan"), dtype=torch.float64, device=DEVICE)
    prefix, lse = whole.clone(), torch.full((case.query.shape[1], num_rows), float("nan"), device=DEVICE)
    num_words = case.row_mask.shape[1] - soft_words(0 if case.soft is None else case.soft.shape[2])
    for request in range(step.idx_mapping.shape[0]):
        first, last = step.query_start_loc[request : request + 2].tolist()
        start, end = int(case.prefix_len[request]), int(step.seq_lens[request])
        if first == last:
            continue
        position = torch.arange(end, device=DEVICE)
        blocks = case.block_table[request, position // case.cache.shape[2]].long()
        keys, values = case.cache[blocks, :, position % case.cache.shape[2]].chunk(2, -1)
        seen = position[None] <= torch.arange(end - (last - first), end, device=DEVICE)[:, None]
        query, mask = case.query[first:last], case.row_mask[first:last]
        if start < end:
            seen[:, start:] = naive.unpack_bits(mask[:, :num_words])[:, : end - start]
        everything = (keys, values, seen)
        if case.soft is not None and start < end:
            prompts = (*case.soft.transpose(1, 2), naive.unpack_bits(mask[:, num_words:])[:, : case.soft.shape[2]])
            everything = tuple(torch.cat(pair, i // 2) for i, pair in enumerate(zip(everything, prompts, strict=True)))
        whole[first:last], _ = softmax_attention(query, *everything, case.scale)
        lse[:, first:last] = float("inf") if request % 2 else float("-inf")
        if start > 0:
            prefix[first:last], lse[:, first:last] = softmax_attention(
                query, keys[:start], values[:start], seen[:, :start], case.scale
            )
    return whole, prefix.to(case.query.dtype), lse.float()


def paged_tail(case):
    return PagedTail(case.cache, case.block_table, case.prefix_len, case.step.seq_lens)


def run(operation, case, out, lse, *, tail=None, row_mask=None, **form):
    """A kernel or its twin over a case: the output. ``form`` is the softmax's, in the place of the case's own."""
    starts, counts = case.step.query_start_loc, case.step.query_start_loc.diff()
    row_mask = case.row_mask if row_mask is None else row_mask
    rows = QueryRows(case.query, out.clone(), lse, starts, row_mask, len(counts), int(counts.max()))
    operation(rows, paged_tail(case) if tail is None else tail, Softmax(case.scale, **({"soft": case.soft} | form)))
    return rows.out


class Paged(NamedTuple):
    """A batch's cache as on a GPU; where no row looks are NaN, and blocks before every window lead anywhere."""

    batch: Batch
    prefix: PagedTail

    def rows(self, out, lse):
        batch, tail = self.batch, self.batch.tail
        starts = batch.query_start_loc
        return QueryRows(batch.query, out, lse, starts, tail.row_mask, tail.num_reqs, tail.max_query_len)


def paged(shape, requests, form, seed):
    """A batch of verification rows alone."""
    batch = make_batch(shape, requests, seed)
    cache, table = batch.cache.clone(), batch.block_table.clone()
    for index, request in enumerate(requests):
        begin = max(request.prefix - form.window + bool(request.parents), 0) if form.window else 0
        for token in range(begin):
            cache[table[index, token // BLOCK_SIZE].long(), :, token % BLOCK_SIZE] = torch.nan
        table[index, : begin // BLOCK_SIZE] = 2**31 - 1  # freed
    on_device = batch._replace(
        query=batch.query.to(DEVICE),
        query_start_loc=batch.query_start_loc.to(DEVICE),
        tail=batch.tail._replace(row_mask=batch.tail.row_mask.to(DEVICE)),
    )
    tensors = (cache, table, batch.tail.prefix_len, batch.seq_lens)
    return Paged(on_device, PagedTail(*(x.to(DEVICE) for x in tensors)))
