"""Queues of tokens that one drafter writes into its cache later, many at once."""

from typing import Any

import torch
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from vllm_crossspec.catch_up.kernels import joined, locate

MAX_UNFUSED = 1024
"""Most rows of states that wait to be fused; it bounds their memory and the time of one call."""
STEPS = 32
"""Most rounds of the largest batch whose states wait."""


class CatchUpQueue:
    """Fuses the target's states for one drafter and writes its keys and values.

    ``taps`` are the indices of the drafter's own states among a step's tapped states.
    """

    def __init__(self, proposer: Any, taps: list[int]):
        self.proposer, self.taps = proposer, taps

    def fuse(self, states: list[torch.Tensor], rows: torch.Tensor | None = None) -> torch.Tensor:
        """[n, F] features of a step's tapped states ([T, H] each) at int64 [n] rows; None: all rows."""
        return self.proposer.fuse(joined(states, self.taps, rows))

    def write(self, features: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Write keys and values of accepted tokens, from features [n, F]; int64 [n] slots (negative: padding)."""
        tables, req_states = self.proposer.block_tables, self.proposer.req_states
        next_tokens, kv_slots = torch.empty_like(slots), []
        for group in self.proposer.kv_groups:
            kv_slots.append(torch.empty_like(slots))
            locate(
                slots=slots,
                positions=positions,
                block_table=tables.block_tables[group].gpu,
                block_size=tables.block_sizes[group],
                all_token_ids=req_states.all_token_ids.gpu,
                kv_slots=kv_slots[-1],
                next_tokens=next_tokens,
                pad=PAD_SLOT_ID,
            )
        self.proposer.write_context(features, next_tokens, positions, kv_slots)


class StateQueue(CatchUpQueue):
    """The queue of a single drafter for rounds without drafts: states in order of arrival, fused when flushed.

    Such a round costs a few copies instead of a forward pass, and a flush reads the drafter's weights once for many
    tokens. All data is on the device; the host knows only the number of rows.
    """

    def __init__(self, proposer: Any, taps: list[int]):
        super().__init__(proposer, taps)
        config, device = proposer.engine_config, proposer.device
        self.capacity = min(STEPS * config.scheduler_config.max_num_seqs, MAX_UNFUSED)
        shape, dtype = (self.capacity, config.model_config.get_hidden_size()), config.model_config.dtype
        self._states = [torch.zeros(shape, dtype=dtype, device=device) for _ in taps]
        self._slots = torch.zeros(self.capacity, dtype=torch.int64, device=device)
        self._positions = torch.zeros(self.capacity, dtype=torch.int64, device=device)
        self._num_rows = 0

    def keep(self, batch: Any, states: list[torch.Tensor]) -> bool:
        """Keep a step's states ([T, H] of each tapped layer) for later; False if it must be taken in now.

        Only a step with one row per request is kept, because such a row is surely accepted.
        """
        num_reqs = batch.num_reqs
        if self._num_rows + num_reqs > self.capacity:
            self.flush()
        if batch.num_tokens != num_reqs or num_reqs > self.capacity:
            return False
        rows = slice(self._num_rows, self._num_rows + num_reqs)
        for kept, new in zip(self._states, states, strict=True):
            kept[rows] = new[:num_reqs]
        self._slots[rows] = batch.idx_mapping[:num_reqs]
        self._positions[rows] = batch.positions[:num_reqs]
        self._num_rows += num_reqs
        return True

    @torch.inference_mode()
    def flush(self) -> None:
        """Take in all waiting states."""
        num_rows, self._num_rows = self._num_rows, 0
        if num_rows:
            features = self.fuse([states[:num_rows] for states in self._states])
            self.write(features, self._slots[:num_rows], self._positions[:num_rows])
