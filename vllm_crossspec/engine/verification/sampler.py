"""Sample-and-match verification with vLLM's own sampler (design: the target's samples decide, drafts only save time).

The token that the target samples at a node does not depend on the drafts, so the text is plain's: token for token
where the noise is keyed by seed and position, in distribution otherwise, for every sampling parameter that vLLM's
sampler knows.
"""

from collections.abc import Callable

import numpy as np
import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import _iter_request_chunks, get_max_chunk_logits

from vllm_crossspec.engine.draft_state import DraftState
from vllm_crossspec.engine.verification.penalties import TreePenalties
from vllm_crossspec.verify.rows import gather_rows
from vllm_crossspec.verify.walk import walk_tree


class MatchVerifier:
    """Takes the place of vLLM's rejection sampler: sample at every node, then walk while the samples are drafted.

    Args:
        sampler: vLLM's.
        state: of the drafts, those of the step laid out.
        planned_rows: tells ``Step.planned_rows`` of the step under way.

    Attributes:
        penalties: the processor that needs the step's live rows; None where all drafts are chains.
    """

    enable_adaptive_verification = False  # vLLM's warm-up on a GPU asks its rejection sampler for this

    def __init__(self, sampler: Sampler, state: DraftState, planned_rows: Callable[[], torch.Tensor | None]):
        self.sampler, self.state, self.planned_rows = sampler, state, planned_rows
        self.penalties: TreePenalties | None = None

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Verify the step's drafts (vLLM's protocol).

        Args:
            logits: [L, vocabulary], grammars applied.
            input_batch: of the step.
            draft_logits: not looked at: which drafts were made does not change what the target samples.
            invalid_drafts: bool [L] drafts that a grammar refused; they match nothing.

        Returns:
            D + 1 token columns a request, of which ``num_sampled`` count.
        """
        state, batch, sampler = self.state, input_batch, self.sampler
        num_reqs = batch.num_reqs
        num_nans = get_num_nans(logits) if sampler.compute_nans else None
        token_ids, positions = gather_rows(batch.logits_indices, batch.input_ids, batch.positions)
        wants_logprobs = sampler.get_logprobs_dims(batch.idx_mapping_np, include_token_ids=False)
        sampled, processed = self._sample(logits, batch, token_ids, positions, wants_logprobs is not None)
        if invalid_drafts is not None:
            token_ids = token_ids.masked_fill(invalid_drafts, -1)
        planned, num_sampled = self.planned_rows(), state.num_sampled[:num_reqs]
        # Anew in every step: the last one's may still be on their way to the host.
        out_tokens = sampled.new_empty((num_reqs, state.max_depth + 1), dtype=torch.int64)
        num_rejected = torch.empty_like(num_sampled)
        walk_tree(
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
        logprobs = None
        if wants_logprobs is not None:
            scores = processed if processed is not None else logits
            logprobs = self._logprobs(scores, batch, out_tokens, wants_logprobs[0])
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
        """vLLM's sampler at every row, by as many whole requests at once as vLLM itself would hold in float32.

        Returns:
            int64 [L] samples; the processed logits where log-probabilities are asked for of those, else None.
        """
        starts = batch.cu_num_logits_np
        chunks = list(_iter_request_chunks(starts, get_max_chunk_logits(logits.shape[1])))
        keep = return_logprobs and self.sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES
        live = self._live_per_row(batch, logits.shape[0])
        parts, kept = [], []
        for first, last in chunks:
            lo, hi = int(starts[first]), int(starts[last])
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
        """int32 [L] live nodes of each row's request; None where no request of the batch is penalized."""
        if self.penalties is None or not np.any(self.penalties.chain.use_penalty[batch.idx_mapping_np]):
            return None
        repeats = batch.cu_num_logits[1:] - batch.cu_num_logits[:-1]
        return torch.repeat_interleave(self.state.num_live[: batch.num_reqs], repeats, output_size=num_rows)

    def _logprobs(
        self, scores: torch.Tensor, batch: InputBatch, out_tokens: torch.Tensor, num_logprobs: int
    ) -> LogprobsTensors:
        """Log-probabilities along each accepted path: the path's rows, then vLLM's own function."""
        num_reqs, width = batch.num_reqs, self.state.max_depth + 1
        rows = (batch.cu_num_logits[:-1, None] + self.state.path[:num_reqs]).flatten()
        return compute_topk_scores(
            scores[rows],
            num_logprobs,
            out_tokens.flatten(),
            list(range(0, num_reqs * width + 1, width)),
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )
