"""How a drafter runs a pass of its own: by which graph, over which slots, and what attention is told of it.

R requests, each of equally many rows. The speculator is a proposer, which is one of vLLM's own.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_crossspec.types import StepInputs


class Dispatch(NamedTuple):
    """How a pass is to run: vLLM's description of it, and int32 [ranks] rows of every rank with data parallelism."""

    desc: BatchExecutionDescriptor
    tokens_across_dp: torch.Tensor | None

    @property
    def in_graph(self) -> bool:
        """Whether a whole captured graph is replayed."""
        return bool(self.desc.cg_mode == CUDAGraphMode.FULL)


def num_requests(step: StepInputs) -> int:
    """Requests of a round's passes: of a made-up one, whose batch is padded to a graph, what the ranks agreed on.

    From vLLM 0.33 on that is the most requests that any of them really has, and rounds of more are refused.
    """
    num_reqs, sync = int(step.batch.num_reqs), step.dp_sync
    return min(num_reqs, sync.num_reqs) if sync is not None and step.is_dummy else num_reqs


def dispatch(
    speculator: DraftModelSpeculator,
    manager: CudaGraphManager | None,
    num_reqs: int,
    rows_per_req: int,
    step: StepInputs,
) -> Dispatch:
    """Choose the graph of ``manager`` for a pass, agreed among the data-parallel ranks."""
    sync, num_rows = step.dp_sync, num_reqs * rows_per_req
    if sync is not None:
        sync, num_rows = speculator._build_uniform_batch_dp_sync(sync, num_reqs, rows_per_req)
    desc, sync = dispatch_cg_and_sync_dp(
        manager,
        num_reqs,
        num_rows,
        uniform_token_count=rows_per_req,
        dp_size=speculator.dp_size,
        dp_rank=speculator.dp_rank,
        need_eager=step.is_profile,
        dp_sync_state=sync,
    )
    return Dispatch(desc, sync.num_tokens_across_dp if sync is not None else None)


def uniform_metadata(
    speculator: DraftModelSpeculator,
    desc: BatchExecutionDescriptor,
    num_reqs: int,
    rows_per_req: int,
    seq_lens_upper_bound: torch.Tensor,
    step: int,
    causal: bool | Mapping[int, bool] = True,
) -> dict[str, Any] | None:
    """What attention is told of a pass over the rows that lie in the speculator's own buffers.

    Args:
        desc: of :func:`dispatch`.
        seq_lens_upper_bound: int32 [at least R] on the host, of the target's step.
        step: tokens that the pass may have beyond them.
        causal: one answer, or one for each cache group.
    """
    metadata: dict[str, Any] | None = speculator._build_uniform_attn_metadata(
        desc, num_reqs, rows_per_req, seq_lens_cpu_upper_bound=seq_lens_upper_bound, step=step, causal=causal
    )
    return metadata


def map_block_tables(speculator: DraftModelSpeculator) -> None:
    """The batch's block tables in the kernels' blocks, for a graph that is replayed without metadata."""
    for groups in speculator.attn_groups:
        for group in groups:
            group.map_to_kernel_block_table(speculator.block_tables.input_block_tables[group.kv_cache_group_id])


def slots_by_layer(speculator: DraftModelSpeculator, kv_slots: torch.Tensor) -> dict[str, torch.Tensor]:
    """The cache kv_slots [groups, rows] of a pass under the names of the layers that write there."""
    by_layer: dict[str, torch.Tensor] = build_slot_mappings_by_layer(kv_slots, speculator.kv_cache_config)
    return by_layer


def forward_context(
    speculator: DraftModelSpeculator,
    num_rows: int,
    attn_metadata: dict[str, Any] | None,
    slot_mapping: dict[str, torch.Tensor] | None,
    num_tokens_across_dp: torch.Tensor | None,
    cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
) -> AbstractContextManager[None]:
    """What vLLM's layers look up while the speculator's model runs over ``num_rows`` rows; vLLM's arguments."""
    context: AbstractContextManager[None] = set_forward_context(
        attn_metadata, speculator.vllm_config, num_rows, num_tokens_across_dp, cudagraph_runtime_mode,
        BatchDescriptor(num_tokens=num_rows), slot_mapping=slot_mapping,
    )  # fmt: skip
    return context
