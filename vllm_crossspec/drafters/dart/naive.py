"""The kernels in plain PyTorch, one row at a time."""

import torch

from vllm_crossspec.drafters.dart.inputs import PAD_SLOT, DartRows
from vllm_crossspec.types import StepInputs


def prepare_rows(
    step: StepInputs,
    *,
    block_table: torch.Tensor,
    block_size: int,
    num_queries: int,
    max_model_len: int,
    takes_last: bool,
    kept: int,
    out: DartRows,
) -> None:
    """As ``prepare_rows``."""

    def cache_slot(request: int, position: int) -> int:
        block = position // block_size
        number = int(block_table[request, block]) if block < block_table.shape[1] else 0
        return number * block_size + position % block_size if number else PAD_SLOT

    batch, positions = step.batch, step.batch.positions
    _clear(out)
    for request, slot in enumerate(batch.idx_mapping[: batch.num_reqs].tolist()):
        start, end = batch.query_start_loc[request : request + 2].tolist()
        last = end - int(step.num_rejected[request]) - 1
        token = int((step.last_sampled if step.num_sampled[request] > 0 else step.next_prefill_tokens.flatten())[slot])
        first = request * kept if kept else start
        for row in range(start, min(end, start + kept) if kept else end):
            place, is_accepted = first + row - start, row <= last
            position = int(positions[row])
            following = token if row == last else int(batch.input_ids[row + 1]) if is_accepted else 0
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
        out.temperature[slot], out.seeds[slot] = step.temperature[slot], step.seeds[slot]
    out.query_start_loc[batch.num_reqs :] = batch.num_reqs * num_queries


def _clear(out: DartRows) -> None:
    """Set the rows past the batch to the padding of CUDA graphs."""
    for buffer in (out.entry_rows, out.entry_tokens, out.positions, out.seq_lens, out.predicted_positions):
        buffer.zero_()
    out.slots.fill_(PAD_SLOT)
    out.request_slots.fill_(-1)
