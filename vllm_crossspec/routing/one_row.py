"""Batches of one row per request, as which a routed round passes requests to vLLM."""

import dataclasses
from typing import NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_crossspec.arrays import Array
from vllm_crossspec.catch_up.kernels import last_tokens
from vllm_crossspec.types import StepInputs


class PackedRows(NamedTuple):
    """Arrays of a batch of one row per request, copied to the device at once.

    Attributes:
        rows: int64 [R] the requests' numbers in the target's batch.
        slots: int64 [R].
        positions: int64 [R] of the last accepted tokens.
        kept: int64 [R] buffer rows of these tokens' features.
        lengths: int32 [R] accepted tokens.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    kept: torch.Tensor
    lengths: torch.Tensor


class LastTokenBatches:
    """Makes batches as if only the last accepted token of each request had been scheduled."""

    def __init__(self, num_slots: int, device: torch.device):
        self.device = device
        self.row_starts = torch.arange(num_slots + 1, dtype=torch.int32, device=device)
        self.ones = torch.ones(num_slots, dtype=torch.int32, device=device)
        self.zeros = torch.zeros(num_slots, dtype=torch.int32, device=device)

    def packed(self, rows: Array, slots: Array, ends: Array, kept: Array) -> PackedRows:
        """Copy int64 [R] arrays to the device; ``ends`` are accepted tokens, the others as in :class:`PackedRows`.

        Each array is aligned to 16 bytes, so that Triton does not compile other kernels.
        """
        num_reqs = len(rows)
        packed = np.zeros((5, num_reqs + num_reqs % 2), dtype=np.int64)
        packed[:4, :num_reqs] = rows, slots, ends - 1, kept
        packed[4].view(np.int32)[:num_reqs] = ends
        on_device = async_tensor_h2d(packed, device=self.device)
        first, second, third, fourth = on_device[:4, :num_reqs].unbind()
        return PackedRows(first, second, third, fourth, lengths=on_device[4].view(torch.int32)[:num_reqs])

    def packed_within(self, rows: Array, slots: Array, firsts: Array, accepted: torch.Tensor) -> PackedRows:
        """As :meth:`packed`, where the host does not know the accepted lengths yet.

        Args:
            rows, slots: as there.
            firsts: int64 [R] buffer rows that position 0 would have.
            accepted: int32 [batch] accepted tokens, on the device.
        """
        num_reqs = len(rows)
        given = np.zeros((5, num_reqs + num_reqs % 2), dtype=np.int64)
        given[:3, :num_reqs] = rows, slots, firsts
        on_device = async_tensor_h2d(given, device=self.device)[:, :num_reqs]
        positions, kept = on_device[3:].unbind()
        lengths = torch.empty(num_reqs, dtype=torch.int32, device=self.device)
        last_tokens(on_device[:3], accepted, positions, kept, lengths)
        return PackedRows(on_device[0], on_device[1], positions, kept, lengths)

    def inputs(
        self, step: StepInputs, rows: Array, ends: Array, packed: PackedRows, features: torch.Tensor
    ) -> StepInputs:
        """A proposer's inputs for some of a step's requests, one row each.

        Args:
            step: the target's.
            rows: int64 [R] the requests' numbers in its batch.
            ends: int64 [R] accepted tokens of each, at most.
            packed: of the same requests.
            features: [R, F] from which the drafter starts.
        """
        batch, num_reqs = step.batch, len(rows)
        batch = dataclasses.replace(
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
            query_start_loc_np=np.arange(num_reqs + 1, dtype=np.int32),
            seq_lens=packed.lengths,
            seq_lens_cpu_upper_bound=torch.from_numpy(ends.astype(np.int32)),
            positions=packed.positions,
            decode_graph_eligible=True,
        )
        return step._replace(
            batch=batch,
            attn_metadata=None,
            slot_mappings=None,
            last_hidden_states=features,
            tapped_hidden_states=None,
            num_sampled=self.ones[:num_reqs],
            num_rejected=self.zeros[:num_reqs],
            num_scheduled=None,
            dp_sync=None,
            mm_inputs=None,
        )
