"""Verification in plain PyTorch: the truth that the kernels are tested against. Arguments are the kernels'."""

import torch

from vllm_crossspec.contemplate.layout import verified_nodes
from vllm_crossspec.verify.tail_attention import UNSCALED, DenseTail, PagedTail, Scales, Softmax, soft_words


def prepare_rows(
    *,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    cu_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    prefill_len: torch.Tensor,
    parents: torch.Tensor,
    sizes: torch.Tensor,
    positions: torch.Tensor,
    row_mask: torch.Tensor,
    prefix_len: torch.Tensor,
    num_live: torch.Tensor,
    max_depth: int,
    contemplates: bool = False,
    num_soft: int = 0,
) -> None:
    """See :func:`vllm_crossspec.verify.rows.prepare_rows`."""
    num_words = row_mask.shape[1] - soft_words(num_soft)
    words = torch.arange(num_words * 32, device=row_mask.device)
    soft = torch.arange(soft_words(num_soft) * 32, device=row_mask.device) < num_soft
    for request, slot in enumerate(idx_mapping.tolist()):
        seq_len = int(seq_lens[request])
        num_rows = int(cu_rows[request + 1] - cu_rows[request])
        root = seq_len - num_rows
        drafted = slot >= 0 and num_rows > 1
        proposed = drafted and root >= int(prefill_len[slot])
        nodes = verified_nodes(num_rows - 1, contemplates)
        live = min(nodes, int(sizes[slot])) if proposed else 0
        num_live[request] = live
        prefix_len[request] = root if drafted else seq_len
        if not drafted:
            continue
        first = int(query_start_loc[request + 1]) - num_rows
        for row in range(num_rows):
            node = row - nodes - 1 if row > nodes else row  # a contemplate row stands behind this one
            if not proposed and node <= nodes:
                line, depth = list(range(node + 1)), node
            elif node <= live:
                line = [node, *ancestors_of(node, parents[slot].tolist())]
                depth = len(line) - 1
            else:
                line, depth = [0], 0 if row > nodes else 1
            assert depth <= max(max_depth, 1) or not proposed
            depth += row > nodes
            seen = torch.isin(words, torch.tensor([row, *line], device=words.device))
            row_mask[first + row] = pack_bits(torch.cat([seen, soft & (row > nodes)]))
            positions[first + row] = root + depth


def ancestors_of(row: int, parents: list[int]) -> list[int]:
    """Rows above ``row``, the root last; none for the root itself."""
    ancestors: list[int] = []
    while row > 0:
        row = parents[row - 1]
        ancestors.append(row)
    return ancestors


def pack_bits(seen: torch.Tensor) -> torch.Tensor:
    """Bools [..., 32 * W] as int32 words [..., W], the lowest bit first."""
    weights = 2 ** torch.arange(32, device=seen.device)
    words = (seen.unflatten(-1, (-1, 32)).long() * weights).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack_bits(words: torch.Tensor) -> torch.Tensor:
    """Bools [..., 32 * W] of int32 words [..., W]."""
    return ((words[..., None] >> torch.arange(32, device=words.device)) & 1).bool().flatten(-2)


def walk_tree(
    *,
    idx_mapping: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_live: torch.Tensor,
    parents: torch.Tensor,
    sampled: torch.Tensor,
    node_tokens: torch.Tensor,
    out_tokens: torch.Tensor,
    path: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    cu_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    prefill_len: torch.Tensor,
    max_depth: int,
) -> None:
    """See :func:`vllm_crossspec.verify.walk.walk_tree`."""
    num_reqs = idx_mapping.shape[0]
    out_tokens[:num_reqs] = 0
    path[:num_reqs] = 0
    for request, slot in enumerate(idx_mapping.tolist()):
        first = int(cu_num_logits[request])
        live = min(int(num_live[request]), int(cu_num_logits[request + 1]) - first - 1)
        current: int | None = 0 if slot >= 0 and live >= 0 else None
        length = 0
        while current is not None and length <= max_depth:
            token = int(sampled[first + current])
            out_tokens[request, length] = token
            path[request, length] = current
            length += 1
            children = (
                row
                for row in range(1, live + 1)
                if int(parents[slot, row - 1]) == current and 0 <= token == int(node_tokens[first + row])
            )
            current = next(children, None)
        counts = length > 0 and seq_lens[request] >= prefill_len[slot]
        num_sampled[request] = length if counts else 0
        num_rejected[request] = int(cu_rows[request + 1] - cu_rows[request]) - length if counts else 0


def last_rows(
    *, cu_num_logits: torch.Tensor, num_sampled: torch.Tensor, path: torch.Tensor, rows: torch.Tensor
) -> None:
    """See :func:`vllm_crossspec.verify.walk.last_rows`."""
    for request, first in enumerate(cu_num_logits[:-1].tolist()):
        rows[request] = first + int(path[request, max(int(num_sampled[request]) - 1, 0)])


def tail_attention(
    *,
    query: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    tail: PagedTail | DenseTail,
    query_start_loc: torch.Tensor,
    row_mask: torch.Tensor,
    softmax: Softmax,
    num_reqs: int,
    max_query_len: int,
    soft: torch.Tensor | None = None,
    scales: Scales = UNSCALED,
) -> None:
    """See :func:`vllm_crossspec.verify.tail_attention.tail_attention`."""
    query = _queries_of(query, scales)
    num_words = row_mask.shape[1] - soft_words(0 if soft is None else soft.shape[2])
    for request in range(num_reqs):
        first, last = query_start_loc[request : request + 2].tolist()
        keys, values = _tail_of(tail, request, last - first, scales)
        if not (keys.shape[0] or softmax.sinks is not None) or first == last:
            continue
        seen = in_window(unpack_bits(row_mask[first:last, :num_words]), softmax.window)[:, : keys.shape[0]]
        if soft is not None:
            softened = soft.float().transpose(1, 2)
            keys, values = (torch.cat(pair) for pair in zip((keys, values), softened, strict=True))
            seen = torch.cat([seen, unpack_bits(row_mask[first:last, num_words:])[:, : soft.shape[2]]], dim=1)
        group = query.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query[first:last], keys) * softmax.scale
        scores = cap(scores, softmax.soft_cap).masked_fill(~seen, float("-inf"))
        if softmax.sinks is not None:
            sinks = softmax.sinks.float()[:, None, None].expand(-1, last - first, 1)
            scores = torch.cat([scores, sinks], dim=-1)
            values = torch.cat([values, values.new_zeros(1, *values.shape[1:])])
        prefix = lse[:, first:last].float()
        prefix = torch.where(prefix.isinf(), float("-inf"), prefix)
        both = torch.cat([prefix[..., None], scores], -1)
        weights = torch.where(both.isinf().all(-1, keepdim=True), 0.0, torch.softmax(both, -1))
        before = torch.where(prefix.isinf().T[..., None], 0.0, out[first:last].float())
        merged = before * weights[..., 0].T[..., None] + torch.einsum("hqk,khd->qhd", weights[..., 1:], values)
        out[first:last] = merged.to(out.dtype)


def in_window(seen: torch.Tensor, window: int) -> torch.Tensor:
    """Bools [rows, keys] that say of each row's line what it sees: with a window, the last ones of it."""
    if not window:
        return seen
    behind = seen.sum(1, keepdim=True) - seen.cumsum(1)
    return seen & (behind < window)


def cap(scores: torch.Tensor, soft_cap: float) -> torch.Tensor:
    """Scores after a layer's soft cap; 0: as they are."""
    return soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores


def window_attention(
    *,
    query: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    prefix: PagedTail,
    query_start_loc: torch.Tensor,
    row_mask: torch.Tensor,
    softmax: Softmax,
    num_reqs: int,
    max_query_len: int,
    tails_in_cache: bool = True,
    scales: Scales = UNSCALED,
) -> None:
    """See :func:`vllm_crossspec.verify.window_attention.window_attention`."""
    query = _queries_of(query, scales)
    block_size = prefix.cache.shape[2]
    for request in range(num_reqs):
        first, last = query_start_loc[request : request + 2].tolist()
        length = int(prefix.prefix_len[request])
        has_tail = not tails_in_cache or int(prefix.seq_lens[request]) > length
        for row in range(first, last):
            seen = int(unpack_bits(row_mask[row]).sum()) if has_tail else 0
            begin = min(max(length + seen - softmax.window, 0), length)
            key = torch.arange(begin, length, device=query.device)
            blocks = prefix.block_table[request, key // block_size].long()
            keys, values = _entries_of(prefix.cache, blocks, key % block_size, scales)
            group = query.shape[1] // keys.shape[1]
            keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
            scores = cap(torch.einsum("hd,khd->hk", query[row], keys) * softmax.scale, softmax.soft_cap)
            lse[:, row] = scores.logsumexp(-1)
            out[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), values).to(out.dtype)


def _tail_of(
    tail: PagedTail | DenseTail, request: int, num_rows: int, scales: Scales
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, float32 [rows, kv_heads, head_size] each, of one request's tail."""
    if isinstance(tail, DenseTail):
        scratch = tail.keys_values[request, : int(tail.length)].float()
        return scratch[:, 0], scratch[:, 1]
    start, end = int(tail.prefix_len[request]), int(tail.seq_lens[request])
    positions = torch.arange(start, min(end, start + num_rows) if end > start else start, device=tail.cache.device)
    block_size = tail.cache.shape[2]
    blocks = tail.block_table[request, positions // block_size].long()
    return _entries_of(tail.cache, blocks, positions % block_size, scales)


def _entries_of(
    cache: torch.Tensor, blocks: torch.Tensor, places: torch.Tensor, scales: Scales
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, float32 [rows, kv_heads, head_size] each, of a paged cache."""
    # PyTorch does not index float8.
    raw = cache if scales.key is None else cache.view(torch.uint8)
    keys, values = raw[blocks, :, places].view(cache.dtype).float().chunk(2, -1)
    if scales.key is not None and scales.value is not None:
        return keys * scales.key.view(-1, 1), values * scales.value.view(-1, 1)
    return keys, values


def _queries_of(query: torch.Tensor, scales: Scales) -> torch.Tensor:
    """Queries, float32 [rows, Hq, head_size]; a scale is that of the heads which share a KV head."""
    if scales.query is None:
        return query.float()
    return query.float() * scales.query.view(-1, 1).repeat_interleave(query.shape[1] // scales.query.numel(), 0)


def tree_penalties(
    *,
    logits: torch.Tensor,
    idx_mapping_per_row: torch.Tensor,
    token_ids: torch.Tensor,
    local_pos: torch.Tensor,
    live_per_row: torch.Tensor,
    parents: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    prompt_bin_mask: torch.Tensor,
    output_bin_counts: torch.Tensor,
    max_depth: int,
) -> None:
    """See :func:`vllm_crossspec.verify.penalties.tree_penalties`."""
    for index, slot in enumerate(idx_mapping_per_row.tolist()):
        if slot < 0:
            continue
        row = int(local_pos[index])
        path = [row, *ancestors_of(row, parents[slot].tolist())][:-1] if 0 < row <= int(live_per_row[index]) else []
        assert len(path) <= max_depth
        counts = output_bin_counts[slot].clone()
        for node in path:
            counts[int(token_ids[index - row + node])] += 1
        seen = unpack_bits(prompt_bin_mask[slot])[: logits.shape[1]] | (counts > 0)
        scale = torch.where(seen, repetition[slot], 1.0)
        penalised = logits[index].float()
        penalised = penalised * torch.where(penalised > 0, 1.0 / scale, scale)
        penalised -= frequency[slot] * counts
        penalised -= presence[slot] * (counts > 0)
        logits[index] = penalised.to(logits.dtype)
