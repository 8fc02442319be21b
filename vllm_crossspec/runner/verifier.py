"""Sample-and-match verification with vLLM's own sampler: the target's samples decide, drafts only save time.

The target's sample at a node does not depend on the drafts, so the text is that of plain decoding. It is the same token
for token if the noise is keyed by seed and position, else in distribution. All of vLLM's sampling parameters work.
"""

from collections.abc import Callable

import numpy as np
import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import _iter_request_chunks, get_max_chunk_logits

from vllm_crossspec.trees.draft_state import DraftState
from vllm_crossspec.trees.penalties_state import TreePenalties
from vllm_crossspec.trees.verify.rows import gather_rows
from vllm_crossspec.trees.verify.walk import Walk, walk_tree


class MatchVerifier:
    """Replaces vLLM's rejection sampler: samples at every node, then walks down the tree while samples match drafts.

    ``planned_rows`` returns ``Step.planned_rows`` of the current step.
    """

    enable_adaptive_verification = False  # vLLM's warm-up on a GPU reads this

    def __init__(self, sampler: Sampler, state: DraftState, planned_rows: Callable[[], torch.Tensor | None]):
        self.sampler, self.state, self.planned_rows = sampler, state, planned_rows
        self.penalties: TreePenalties | None = None  # needs the step's live rows; None if all drafts are chains

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Verify the step's drafts (vLLM's protocol): D + 1 token columns per request, ``num_sampled`` of them valid.

        Args:
            logits: [L, vocabulary], grammars applied.
            draft_logits: ignored: the target's samples do not depend on the drafts.
            invalid_drafts: bool [L] drafts that a grammar refused; they match nothing.
        """
        state, batch, sampler = self.state, input_batch, self.sampler
        num_reqs = batch.num_reqs
        num_nans = get_num_nans(logits) if sampler.compute_nans else None
        token_ids, positions = gather_rows(batch.logits_indices, batch.input_ids, batch.positions)
        wants_logprobs = sampler.get_logprobs_dims(batch.idx_mapping_np, include_token_ids=False)
        sampled, processed = self._sample(logits, batch, token_ids, positions, wants_logprobs is not None)
        if invalid_drafts is not None:
            token_ids = token_ids.masked_fill(invalid_drafts, -1)
        planned = self.planned_rows()
        # Allocated in every step: vLLM may still be copying the last step's tensors to the host on another stream.
        out_tokens = sampled.new_empty((num_reqs, state.max_depth + 1), dtype=torch.int64)
        num_sampled = sampled.new_empty(num_reqs, dtype=torch.int32)
        num_rejected = torch.empty_like(num_sampled)
        walk = Walk(
            idx_mapping=batch.idx_mapping,
            cu_num_logits=batch.cu_num_logits,
            num_live=state.num_live,
            parents=state.parents,
            sampled=sampled,
            node_tokens=token_ids,
            out_tokens=out_tokens,
            path=state.path,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
            cu_rows=batch.cu_num_logits if planned is None else planned,
            seq_lens=batch.seq_lens,
            prefill_len=sampler.req_states.prefill_len.gpu,
            max_depth=state.max_depth,
        )
        walk_tree(walk)
        logprobs = None
        if wants_logprobs is not None:
            # Gather the rows of each accepted path for vLLM's own function.
            width = state.max_depth + 1
            rows = (batch.cu_num_logits[:-1, None] + state.path[:num_reqs]).flatten()
            logprobs = compute_topk_scores(
                (logits if processed is None else processed)[rows],
                wants_logprobs[0],
                out_tokens.flatten(),
                list(range(0, num_reqs * width + 1, width)),
                logits_mode=sampler.logprobs_mode in ("raw_logits", "processed_logits"),
            )
        return SamplerOutput(
            sampled_token_ids=out_tokens,
            logprobs_tensors=logprobs,
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _sample(
        self,
        logits: torch.Tensor,
        batch: InputBatch,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        return_logprobs: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run vLLM's sampler at every row, in chunks of whole requests of at most vLLM's own float32 size.

        Returns int64 [L] samples, and the processed logits if log-probabilities of these are requested, else None.
        """
        starts = batch.cu_num_logits_np
        most = get_max_chunk_logits(logits.shape[1])
        # Of rows that are shared out on the device the host has only a bound; but they are few enough for one chunk.
        chunks = list(_iter_request_chunks(starts, most)) if len(logits) > most else [(0, batch.num_reqs)]
        keep = return_logprobs and self.sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES
        live = self._live_per_row(batch, logits.shape[0])
        parts, kept = [], []
        for first, last in chunks:
            lo, hi = int(starts[first]), min(int(starts[last]), len(logits))
            if self.penalties is not None:
                self.penalties.live_per_row = None if live is None else live[lo:hi]
            sampled, processed = self.sampler.sample(
                logits[lo:hi],
                batch.expanded_idx_mapping[lo:hi],
                batch.idx_mapping[first:last],
                batch.idx_mapping_np[first:last],
                positions[lo:hi],
                token_ids[lo:hi],
                batch.expanded_local_pos[lo:hi],
                batch.seq_lens_cpu_upper_bound.numpy()[first:last],
                return_logprobs=return_logprobs,
            )
            parts.append(sampled)
            if keep:
                kept.append(processed)
        if self.penalties is not None:
            self.penalties.live_per_row = None
        return (parts[0] if len(parts) == 1 else torch.cat(parts)), (torch.cat(kept) if kept else None)

    def _live_per_row(self, batch: InputBatch, num_rows: int) -> torch.Tensor | None:
        """int32 [L] live nodes of each row's request; None if no request of the batch has penalties."""
        if self.penalties is None or not np.any(self.penalties.chain.use_penalty[batch.idx_mapping_np]):
            return None
        repeats = batch.cu_num_logits[1:] - batch.cu_num_logits[:-1]
        return torch.repeat_interleave(self.state.num_live[: batch.num_reqs], repeats, output_size=num_rows)
