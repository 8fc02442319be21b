"""Verification in plain PyTorch, against which the kernels are tested."""

import torch

from vllm_crossspec.kinds.contemplate_layout import verified_nodes
from vllm_crossspec.trees.verify.penalties import Penalties
from vllm_crossspec.trees.verify.rows import StepRows
from vllm_crossspec.trees.verify.tail_attention import DenseTail, PagedTail, QueryRows, Scales, Softmax, soft_words
from vllm_crossspec.trees.verify.walk import Walk


def prepare_rows(step: StepRows) -> None:
    """As ``rows.prepare_rows``."""
    row_mask, max_depth = step.row_mask, step.max_depth
    words = torch.arange((row_mask.shape[1] - soft_words(step.num_soft)) * 32, device=row_mask.device)
    soft = torch.arange(soft_words(step.num_soft) * 32, device=row_mask.device) < step.num_soft
    for request, slot in enumerate(step.idx_mapping.tolist()):
        seq_len = int(step.seq_lens[request])
        num_rows = int(step.cu_rows[request + 1] - step.cu_rows[request])
        root = seq_len - num_rows
        drafted = slot >= 0 and num_rows > 1
        proposed = drafted and root >= int(step.prefill_len[slot])
        nodes = verified_nodes(num_rows - 1, step.contemplates)
        live = min(nodes, int(step.sizes[slot])) if proposed else 0
        step.num_live[request] = live
        step.prefix_len[request] = root if drafted else seq_len
        if not drafted:
            continue
        first = int(step.query_start_loc[request + 1]) - num_rows
        for row in range(num_rows):
            node = row - nodes - 1 if row > nodes else row  # the node of a contemplate row
            if not proposed and node <= nodes:
                line, depth = list(range(node + 1)), node
            elif node <= live:
                line = [node, *ancestors_of(node, step.parents[slot].tolist())]
                depth = len(line) - 1
            else:
                line, depth = [0], 0 if row > nodes else 1
            assert depth <= max(max_depth, 1) or not proposed
            depth += row > nodes
            seen = torch.isin(words, torch.tensor([row, *line], device=words.device))
            row_mask[first + row] = pack_bits(torch.cat([seen, soft & (row > nodes)]))
            step.positions[first + row] = root + depth


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


def walk_tree(walk: Walk) -> None:
    """As ``walk.walk_tree``."""
    starts, parents = walk.cu_num_logits.tolist(), walk.parents
    walk.out_tokens[: len(walk.idx_mapping)] = 0
    walk.path[: len(walk.idx_mapping)] = 0
    for request, slot in enumerate(walk.idx_mapping.tolist()):
        first = starts[request]
        live = min(int(walk.num_live[request]), starts[request + 1] - first - 1)
        current: int | None = 0 if slot >= 0 and live >= 0 else None
        length = 0
        while current is not None and length <= walk.max_depth:
            token = int(walk.sampled[first + current])
            walk.out_tokens[request, length] = token
            walk.path[request, length] = current
            length += 1
            children = (
                row
                for row in range(1, live + 1)
                if int(parents[slot, row - 1]) == current and 0 <= token == int(walk.node_tokens[first + row])
            )
            current = next(children, None)
        counts = length > 0 and walk.seq_lens[request] >= walk.prefill_len[slot]
        walk.num_sampled[request] = length if counts else 0
        num_rows = int(walk.cu_rows[request + 1] - walk.cu_rows[request])
        walk.num_rejected[request] = num_rows - length if counts else 0


def last_rows(
    *, cu_num_logits: torch.Tensor, num_sampled: torch.Tensor, path: torch.Tensor, rows: torch.Tensor
) -> None:
    """As ``walk.last_rows``."""
    for request, first in enumerate(cu_num_logits[:-1].tolist()):
        rows[request] = first + int(path[request, max(int(num_sampled[request]) - 1, 0)])


def tail_attention(rows: QueryRows, tail: PagedTail | DenseTail, softmax: Softmax) -> None:
    """As ``tail_attention.tail_attention``."""
    out, queries, soft = rows.out, _queries_of(rows.query, softmax.scales), softmax.soft
    num_words = rows.row_mask.shape[1] - soft_words(0 if soft is None else soft.shape[2])
    for request in range(rows.num_reqs):
        first, last = rows.query_start_loc[request : request + 2].tolist()
        keys, values = _tail_of(tail, request, last - first, softmax.scales)
        if not (keys.shape[0] or softmax.sinks is not None) or first == last:
            continue
        seen = in_window(unpack_bits(rows.row_mask[first:last, :num_words]), softmax.window)[:, : keys.shape[0]]
        if soft is not None:
            softened = soft.float().transpose(1, 2)
            keys, values = (torch.cat(pair) for pair in zip((keys, values), softened, strict=True))
            seen = torch.cat([seen, unpack_bits(rows.row_mask[first:last, num_words:])[:, : soft.shape[2]]], dim=1)
        keys, values = (x.repeat_interleave(queries.shape[1] // x.shape[1], 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries[first:last], keys) * softmax.scale
        scores = cap(scores, softmax.soft_cap).masked_fill(~seen, float("-inf"))
        if softmax.sinks is not None:
            sinks = softmax.sinks.float()[:, None, None].expand(-1, last - first, 1)
            scores = torch.cat([scores, sinks], dim=-1)
            values = torch.cat([values, values.new_zeros(1, *values.shape[1:])])
        prefix = rows.lse[:, first:last].float()
        prefix = torch.where(prefix.isinf(), float("-inf"), prefix)
        both = torch.cat([prefix[..., None], scores], -1)
        weights = torch.where(both.isinf().all(-1, keepdim=True), 0.0, torch.softmax(both, -1))
        before = torch.where(prefix.isinf().T[..., None], 0.0, out[first:last].float())
        added = weighted(weights[..., 1:], values.transpose(0, 1)).transpose(0, 1)
        out[first:last] = (before * weights[..., 0].T[..., None] + added).to(out.dtype)


def in_window(seen: torch.Tensor, window: int) -> torch.Tensor:
    """Bools [rows, keys] of the keys that each row sees: with a window, the last ones of its path."""
    if not window:
        return seen
    behind = seen.sum(1, keepdim=True) - seen.cumsum(1)
    return seen & (behind < window)


def weighted(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Float32 [heads, rows, keys] weights times [heads, keys, head_size] values; 0 times NaN or infinity is 0."""
    is_flawed = ~values.isfinite()
    sums = torch.bmm(weights, values.masked_fill(is_flawed, 0.0))
    takes_flaws = torch.bmm((weights != 0).to(sums.dtype), is_flawed.to(sums.dtype)) > 0
    return sums.masked_fill(takes_flaws, float("nan"))


def cap(scores: torch.Tensor, soft_cap: float) -> torch.Tensor:
    """Scores after a layer's soft cap; 0: no cap."""
    return soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores


def window_attention(rows: QueryRows, prefix: PagedTail, softmax: Softmax, tails_in_cache: bool = True) -> None:
    """As ``tail_attention.window_attention``."""
    queries, block_size = _queries_of(rows.query, softmax.scales), prefix.cache.shape[2]
    for request in range(rows.num_reqs):
        length = int(prefix.prefix_len[request])
        has_tail = not tails_in_cache or int(prefix.seq_lens[request]) > length
        for row in range(*rows.query_start_loc[request : request + 2].tolist()):
            seen = int(unpack_bits(rows.row_mask[row]).sum()) if has_tail else 0
            begin = min(max(length + seen - softmax.window, 0), length)
            key = torch.arange(begin, length, device=queries.device)
            blocks = prefix.block_table[request, key // block_size].long()
            entries = _entries_of(prefix.cache, blocks, key % block_size, softmax.scales)
            keys, values = (x.repeat_interleave(queries.shape[1] // x.shape[1], 1) for x in entries)
            scores = cap(torch.einsum("hd,khd->hk", queries[row], keys) * softmax.scale, softmax.soft_cap)
            rows.lse[:, row] = scores.logsumexp(-1)
            rows.out[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), values).to(rows.out.dtype)


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
    """Queries, float32 [rows, Hq, head_size]; each scale belongs to the heads of one KV head."""
    if scales.query is None:
        return query.float()
    return query.float() * scales.query.view(-1, 1).repeat_interleave(query.shape[1] // scales.query.numel(), 0)


def tree_penalties(logits: torch.Tensor, given: Penalties) -> None:
    """As ``penalties.tree_penalties``."""
    for index, slot in enumerate(given.idx_mapping_per_row.tolist()):
        if slot < 0:
            continue
        row, live = int(given.local_pos[index]), int(given.live_per_row[index])
        path = [row, *ancestors_of(row, given.parents[slot].tolist())][:-1] if 0 < row <= live else []
        assert len(path) <= given.max_depth
        counts = given.output_bin_counts[slot].clone()
        for node in path:
            counts[int(given.token_ids[index - row + node])] += 1
        seen = unpack_bits(given.prompt_bin_mask[slot])[: logits.shape[1]] | (counts > 0)
        scale = torch.where(seen, given.repetition[slot], 1.0)
        penalised = logits[index].float()
        penalised = penalised * torch.where(penalised > 0, 1.0 / scale, scale)
        penalised -= given.frequency[slot] * counts
        penalised -= given.presence[slot] * (counts > 0)
        logits[index] = penalised.to(logits.dtype)
