"""The plain twin of the kernels: one row after the other."""

import torch

from vllm_crossspec.drafters.dart.inputs import PAD_SLOT, DartRows


def prepare_rows(
    *,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    idx_mapping: torch.Tensor,
    longest: int,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    last_sampled: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    num_queries: int,
    max_model_len: int,
    takes_last: bool,
    kept: int,
    out: DartRows,
) -> None:
    """See :func:`vllm_crossspec.drafters.dart.inputs.prepare_rows`."""

    def cache_slot(request: int, position: int) -> int:
        block = position // block_size
        number = int(block_table[request, block]) if block < block_table.shape[1] else 0
        return number * block_size + position % block_size if number else PAD_SLOT

    num_reqs = idx_mapping.shape[0]
    _clear(out)
    next_prefill_tokens = next_prefill_tokens.flatten()
    for request, slot in enumerate(idx_mapping.tolist()):
        start, end = query_start_loc[request : request + 2].tolist()
        last = end - int(num_rejected[request]) - 1
        token = int((last_sampled if num_sampled[request] > 0 else next_prefill_tokens)[slot])
        first = request * kept if kept else start
        for row in range(start, min(end, start + kept) if kept else end):
            place, is_accepted = first + row - start, row <= last
            position = int(positions[row])
            following = token if row == last else int(input_ids[row + 1]) if is_accepted else 0
            writes = row <= last if takes_last else row < last
            out.context_positions[place] = position if is_accepted else 0
            out.context_tokens[place] = following
            out.context_slots[place] = cache_slot(request, position) if writes else PAD_SLOT
        out.entry_rows[request], out.entry_tokens[request] = first + last - start, token
        for offset in range(num_queries):
            row, position = request * num_queries + offset, int(positions[last]) + offset
            if row < out.slots.shape[0]:
                out.positions[row] = min(position, max_model_len - 1)
                out.slots[row] = cache_slot(request, position) if position < max_model_len else PAD_SLOT
            out.predicted_positions[row], out.request_slots[row] = position + 2, slot
        out.seq_lens[request] = min(int(positions[last]) + num_queries, max_model_len)
        out.query_start_loc[request] = request * num_queries
        out.temperature[slot], out.seeds[slot] = temperature[slot], seeds[slot]
    out.query_start_loc[num_reqs:] = num_reqs * num_queries


def _clear(out: DartRows) -> None:
    """The rows past the batch, as CUDA graphs want them."""
    for buffer in (out.entry_rows, out.entry_tokens, out.positions, out.seq_lens, out.predicted_positions):
        buffer.zero_()
    out.slots.fill_(PAD_SLOT)
    out.request_slots.fill_(-1)
