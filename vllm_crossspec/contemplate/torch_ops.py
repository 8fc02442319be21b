"""The kernels of contemplate tokens as PyTorch operations over the batch, for machines where kernels are interpreted.

Arguments, outputs and ties are the kernels'; the rounding of sums is PyTorch's.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from vllm_crossspec.types import AcceptedPaths


def _request_rows(
    query_start_loc: torch.Tensor, cu_rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """int64 [R] each: token row of every request's root, its verification rows, how many of them are draft nodes."""
    num_rows = cu_rows.long().diff()
    first = query_start_loc[1 : cu_rows.shape[0]].long() - num_rows
    return first, num_rows, (num_rows - 2).clamp(min=0) // 2


def split_rows(
    *,
    query_start_loc: torch.Tensor,
    cu_rows: torch.Tensor,
    cu_nodes: torch.Tensor,
    idx_mapping: torch.Tensor,
    logits_indices: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
) -> None:
    """See :func:`vllm_crossspec.contemplate.kernels.split_rows`."""
    first, _, _ = _request_rows(query_start_loc, cu_rows)
    counts = cu_nodes.long().diff()
    request = torch.repeat_interleave(torch.arange(counts.shape[0], device=counts.device), counts)
    rows = torch.arange(request.shape[0], device=counts.device) - cu_nodes[request]
    logits_indices[: rows.shape[0]] = first[request] + rows
    expanded_idx_mapping[: rows.shape[0]] = idx_mapping[request]
    expanded_local_pos[: rows.shape[0]] = rows.to(expanded_local_pos.dtype)


def contemplate(
    *,
    taps: Sequence[torch.Tensor],
    final_states: torch.Tensor,
    idx_mapping: torch.Tensor,
    paths: AcceptedPaths,
    router: torch.Tensor,
    experts: torch.Tensor,
    top: int,
    contemplate_embeds: torch.Tensor,
    futures: torch.Tensor,
    has_future: torch.Tensor,
) -> None:
    """See :func:`vllm_crossspec.contemplate.kernels.contemplate`."""
    num_reqs = idx_mapping.shape[0]
    query_start_loc, cu_rows, num_sampled, path = paths
    first, num_rows, nodes = _request_rows(query_start_loc, cu_rows)
    lengths = num_sampled[:num_reqs].long()
    last = path[:num_reqs].gather(1, (lengths - 1).clamp(0, path.shape[1] - 1)[:, None])[:, 0].long()
    last = torch.where(num_rows > 1, last.clamp(min=0).minimum(nodes), num_rows - 1)
    known = idx_mapping >= 0
    rows, slots = (first + last)[known], idx_mapping[known].long()
    states = torch.cat([tap[rows] for tap in taps], dim=1).float()
    shares = (F.rms_norm(states, states.shape[1:]) @ router.float().T).softmax(1)
    best = shares.sort(dim=1, descending=True, stable=True)
    weights = best.values[:, :top] / best.values[:, :top].sum(1, keepdim=True)
    embeds = (weights[..., None] * experts[best.indices[:, :top]].float()).sum(1)
    contemplate_embeds[slots] = embeds.to(contemplate_embeds.dtype)
    has = ((num_rows > 1) & (lengths > 0))[known]
    has_future[slots] = has.to(has_future.dtype)
    futures[slots[has]] = final_states[rows[has] + nodes[known][has] + 1].to(futures.dtype)


def write_contemplate_rows(
    *,
    embeds: torch.Tensor,
    contemplate_embeds: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    cu_rows: torch.Tensor,
    max_rows: int,
) -> None:
    """See :func:`vllm_crossspec.contemplate.kernels.write_contemplate_rows`."""
    first, num_rows, nodes = _request_rows(query_start_loc, cu_rows)
    offsets = torch.arange(max_rows, device=first.device)
    wanted = (offsets > nodes[:, None]) & (offsets < num_rows[:, None]) & (idx_mapping >= 0)[:, None]
    request, row = wanted.nonzero(as_tuple=True)
    embeds[first[request] + row] = contemplate_embeds[idx_mapping[request].long()].to(embeds.dtype)
