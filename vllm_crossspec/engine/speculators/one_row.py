"""What passes between a round of routing and vLLM: batches of one row a request."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_crossspec.arrays import Array
from vllm_crossspec.types import StepInputs


class PackedRows(NamedTuple):
    """What a batch of one row a request needs of the host, on the device by one copy.

    Attributes:
        rows: int64 [R] the requests' numbers in the target's batch.
        slots: int64 [R].
        positions: int64 [R] of the last accepted tokens.
        kept: int64 [R] where the features of these tokens are kept.
        lengths: int32 [R] accepted tokens.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    kept: torch.Tensor
    lengths: torch.Tensor


class OneRowBatches:
    """Batches as if only the last accepted token of each request had been scheduled.

    Args:
        num_slots: most requests of a batch.
        device: of the inputs.
    """

    def __init__(self, num_slots: int, device: torch.device):
        self.device = device
        self.row_starts = torch.arange(num_slots + 1, dtype=torch.int32, device=device)
        self.ones = torch.ones(num_slots, dtype=torch.int32, device=device)
        self.zeros = torch.zeros(num_slots, dtype=torch.int32, device=device)

    def packed(self, rows: Array, slots: Array, ends: Array, kept: Array) -> PackedRows:
        """int64 [R] arrays to the device; each begins at 16 bytes, or Triton would compile kernels anew.

        Args:
            ends: accepted tokens of each request. The others are those of :class:`PackedRows`.
        """
        num_reqs = len(rows)
        packed = np.zeros((5, num_reqs + num_reqs % 2), dtype=np.int64)
        packed[:4, :num_reqs] = rows, slots, ends - 1, kept
        packed[4].view(np.int32)[:num_reqs] = ends
        on_device = async_tensor_h2d(packed, device=self.device)
        first, second, third, fourth = on_device[:4, :num_reqs].unbind()
        return PackedRows(first, second, third, fourth, lengths=on_device[4].view(torch.int32)[:num_reqs])

    def batch(self, batch: Any, rows: Array, ends: Array, packed: PackedRows) -> Any:
        """vLLM's batch of some of a batch's requests, one row each.

        Args:
            batch: of the target's step.
            rows: int64 [R] the requests' numbers in it.
            ends: int64 [R] accepted tokens of each.
            packed: of the same requests.
        """
        num_reqs = len(rows)
        starts = np.arange(num_reqs + 1, dtype=np.int32)
        return dataclasses.replace(
            batch,
            req_ids=[batch.req_ids[row] for row in rows],
            num_reqs=num_reqs,
            num_reqs_after_padding=num_reqs,
            idx_mapping=packed.slots.to(batch.idx_mapping.dtype),
            idx_mapping_np=batch.idx_mapping_np[rows],
            num_scheduled_tokens=np.ones(num_reqs, dtype=np.int32),
            num_tokens=num_reqs,
            num_tokens_after_padding=num_reqs,
            num_draft_tokens=0,
            num_draft_tokens_per_req=None,
            query_start_loc=self.row_starts[: num_reqs + 1],
            query_start_loc_np=starts,
            seq_lens=packed.lengths,
            seq_lens_cpu_upper_bound=torch.from_numpy(ends.astype(np.int32)),
            positions=packed.positions,
            decode_graph_eligible=True,
        )

    def step(self, step: StepInputs, batch: Any, features: torch.Tensor, **options: Any) -> StepInputs:
        """What a proposer takes of such a batch; ``features`` [R, F] are those of its rows."""
        num_reqs = batch.num_reqs
        return step._replace(
            batch=batch,
            attn_metadata=None,
            slot_mappings=None,
            last_hidden_states=features,
            tapped_hidden_states=None,
            num_sampled=self.ones[:num_reqs],
            num_rejected=self.zeros[:num_reqs],
            options=options,
            num_scheduled=None,
        )
