"""The kernels of contemplate tokens in plain PyTorch, against which they are tested."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from vllm_crossspec.kinds.contemplate_layout import verified_nodes
from vllm_crossspec.types import AcceptedPaths


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
    """As ``split_rows``."""
    for request, slot in enumerate(idx_mapping.tolist()):
        first = int(query_start_loc[request + 1]) - int(cu_rows[request + 1] - cu_rows[request])
        for row, entry in enumerate(range(*cu_nodes[request : request + 2].tolist())):
            logits_indices[entry] = first + row
            expanded_idx_mapping[entry] = slot
            expanded_local_pos[entry] = row


def mix(states: torch.Tensor, router: torch.Tensor, experts: torch.Tensor, top: int) -> torch.Tensor:
    """The embedding float32 [H] that one request's concatenated states [width] choose (section 3.2)."""
    normed = F.rms_norm(states.float(), states.shape)
    shares = (router.float() @ normed).softmax(0)
    # The lower of equal experts comes first.
    chosen = shares.sort(descending=True, stable=True).indices[:top]
    weights = shares[chosen] / shares[chosen].sum()
    return weights @ experts[chosen].float()


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
    """As ``contemplate``."""
    query_start_loc, cu_rows, num_sampled, path = paths
    for request, slot in enumerate(idx_mapping.tolist()):
        if slot < 0:
            continue
        num_rows = int(cu_rows[request + 1] - cu_rows[request])
        end, length = int(query_start_loc[request + 1]), int(num_sampled[request])
        row, is_verified = end - 1, num_rows > 1
        if is_verified:
            nodes = verified_nodes(num_rows - 1, contemplates=True)
            last = min(max(int(path[request, max(length - 1, 0)]), 0), nodes)
            row = end - num_rows + last
        states = torch.cat([tap[row] for tap in taps])
        contemplate_embeds[slot] = mix(states, router, experts, top).to(contemplate_embeds.dtype)
        has_future[slot] = int(is_verified and length > 0)
        if has_future[slot]:
            futures[slot] = final_states[row + nodes + 1].to(futures.dtype)


def write_contemplate_rows(
    *,
    embeds: torch.Tensor,
    contemplate_embeds: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    cu_rows: torch.Tensor,
    max_rows: int,
) -> None:
    """As ``write_contemplate_rows``."""
    for request, slot in enumerate(idx_mapping.tolist()):
        num_rows = int(cu_rows[request + 1] - cu_rows[request])
        assert num_rows <= max_rows
        if slot >= 0 and num_rows > 1:
            end = int(query_start_loc[request + 1])
            nodes = verified_nodes(num_rows - 1, contemplates=True)
            embeds[end - num_rows + nodes + 1 : end] = contemplate_embeds[slot].to(embeds.dtype)
