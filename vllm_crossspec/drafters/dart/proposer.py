"""DART as a proposer: one forward of one layer over the last accepted entry and K - 1 masks of every request."""

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from vllm_crossspec.config.schema import CrossSpecConfig
from vllm_crossspec.drafters.dart.inputs import DartRows, prepare_rows
from vllm_crossspec.drafters.dflash.proposer import DFlashProposer
from vllm_crossspec.drafting.marginals import MarginalTreeProposer
from vllm_crossspec.drafting.noise import NoiseKeys
from vllm_crossspec.drafting.one_layer import write_entries
from vllm_crossspec.drafting.weights import load_drafter
from vllm_crossspec.types import Candidates, StepInputs
from vllm_crossspec.vllm_api import run


class DartProposer(DFlashProposer):
    """K tokens from one causal forward (Liu et al. 2026, section 3.2).

    Differences from ``DFlashProposer``, whose buffers and graphs it uses:

    - The query rows are the last accepted entry and K - 1 masks; they are causal, and each drafts a token.
    - A context entry is made of a feature and the token after it, as in EAGLE-3.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, name: str, settings: CrossSpecConfig):
        config = vllm_config.speculative_config.draft_model_config.hf_config
        # vLLM's class for block drafters needs the id of a mask token; DART's mask is a learned vector.
        config.mask_token_id = 0
        # It uses the target's positions, but vLLM lengthens the rotary table only for EAGLE's drafters.
        longest = vllm_config.model_config.max_model_len
        config.max_position_embeddings = max(getattr(config, "max_position_embeddings", None) or 0, longest)
        super().__init__(vllm_config, device, name, settings)
        self.requires_non_causal = False
        self.num_query_per_req = self.num_speculative_steps
        self.context_tokens = torch.zeros(self.max_num_tokens, dtype=torch.int64, device=device)
        self.entry_rows = torch.zeros(self.max_num_reqs, dtype=torch.int64, device=device)
        self.entry_tokens = torch.zeros_like(self.entry_rows)

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        overlaid = self.speculative_config.apply_draft_overrides(self.vllm_config)
        return load_drafter(target_model, overlaid, self.name, "dart_head")

    def propose_step(self, step: StepInputs) -> Candidates:
        self._draft(step)
        return Candidates(tokens=self.draft_tokens[: step.batch.num_reqs])

    @torch.inference_mode()
    def catch_up(self, step: StepInputs) -> None:
        """Write keys and values of the step's accepted entries; no forward."""
        if step.is_dummy or not step.tapped_hidden_states:
            return
        kept = self._rows_kept(step)
        num_rows = self._fuse_rows(step, kept)
        self._prepare_rows(step, kept, takes_last=True)
        self._precompute_context_kv(0, num_rows)

    @torch.inference_mode()
    def write_context(
        self, features: torch.Tensor, next_tokens: torch.Tensor, positions: torch.Tensor, kv_slots: list[torch.Tensor]
    ) -> None:
        write_entries(self.model.model, features, next_tokens, positions, kv_slots[0])

    @torch.inference_mode()
    def _draft(self, step: StepInputs) -> None:
        """Take the accepted entries into the cache and draft, by a captured graph if there is one."""
        batch, queries, num_reqs = step.batch, self.num_query_per_req, run.num_requests(step)
        if step.is_dummy:  # padded to a target's graph, it may have more requests than a batch can
            num_reqs = min(num_reqs, max(self.max_num_tokens // queries, 1))
        longest = int(batch.seq_lens_cpu_upper_bound[:num_reqs].max())
        self.draft_max_seq_len = min(longest + queries, self.max_model_len)
        kept = self._rows_kept(step)
        num_rows = self._fuse_rows(step, kept)
        if step.is_dummy and step.skips_attention:  # the memory profile: there is no cache yet
            self._precompute_context_kv(0, num_rows, dummy_run=True)
            self._generate_draft(num_reqs, num_reqs * queries, None, None, None)
            return
        self._prepare_rows(step, kept, takes_last=False)
        how = run.dispatch(self, self.query_cudagraph_manager, num_reqs, queries, step)
        self._store_context(num_rows, how.desc.num_reqs if how.in_graph else None, step.is_dummy)
        metadata = None
        if not (how.in_graph and self.supports_decode_metadata_update):
            bound, causal = batch.seq_lens_cpu_upper_bound, self._group_causal
            metadata = run.uniform_metadata(self, how.desc, num_reqs, queries, bound, queries, causal)
        self._prepare_eplb_forward(num_reqs * queries)
        if how.in_graph:
            assert self.query_cudagraph_manager is not None
            self.query_cudagraph_manager.run_fullgraph(how.desc)
            return
        kv_slots = run.slots_by_layer(self, self.block_tables.slot_mappings[:, : num_reqs * queries])
        self._generate_draft(num_reqs, num_reqs * queries, metadata, kv_slots, how.tokens_across_dp, how.desc.cg_mode)

    def _rows_kept(self, step: StepInputs) -> int:
        """First rows of each request that may hold accepted tokens, if all verify equally many drafts; 0: all rows.

        ``commit`` has already moved a tree's accepted path to the first rows of its request.
        """
        batch, num_drafted = step.batch, step.batch.num_draft_tokens_per_req
        # With a joint budget the device alone knows whose rows are whose.
        if num_drafted is None or not step.tapped_hidden_states or self.settings.shares_rows:
            return 0
        num_scheduled, num_drafted = batch.num_scheduled_tokens[: batch.num_reqs], num_drafted[: batch.num_reqs]
        width = int(num_scheduled[0])
        is_uniform = (num_scheduled == width).all() and (num_drafted == width - 1).all()
        return min(width, self.settings.max_depth + 1) if is_uniform else 0

    def _fuse_rows(self, step: StepInputs, kept: int) -> int:
        """Write the features of the target's rows into the buffer; return their number."""
        # A round that starts from one row per request brings fused features as its last hidden states.
        num_rows, states = step.batch.num_tokens, step.last_hidden_states
        if step.tapped_hidden_states:
            tapped = [state[:num_rows] for state in step.tapped_hidden_states]
            if kept:
                tapped = [state.unflatten(0, (step.batch.num_reqs, -1))[:, :kept] for state in tapped]
                num_rows = step.batch.num_reqs * kept
            states = self.fuse(torch.cat(tapped, dim=-1).view(num_rows, -1))
        self.hidden_states[:num_rows].copy_(states[:num_rows])
        return num_rows

    def _prepare_rows(self, step: StepInputs, kept: int, takes_last: bool) -> None:
        tables, group = self.block_tables, self.draft_kv_cache_group_id
        prepare_rows(
            step,
            block_table=tables.input_block_tables[group],
            block_size=tables.block_sizes[group],
            num_queries=self.num_query_per_req,
            max_model_len=self.max_model_len,
            takes_last=takes_last,
            kept=kept,
            out=DartRows(
                context_positions=self.context_positions,
                context_tokens=self.context_tokens,
                context_slots=self._context_slot_mappings[0],
                entry_rows=self.entry_rows,
                entry_tokens=self.entry_tokens,
                positions=self.input_buffers.positions,
                slots=tables.slot_mappings[group],
                query_start_loc=self.input_buffers.query_start_loc,
                seq_lens=self.input_buffers.seq_lens,
                predicted_positions=self.sample_pos,
                request_slots=self.sample_idx_mapping,
                temperature=self.temperature,
                seeds=self.seeds,
            ),
        )

    def _num_graph_context_tokens(self, num_reqs: int) -> int:
        """Context rows that a graph stores: the most that a verification can accept."""
        return min(num_reqs * (self.settings.max_depth + 1), self.max_num_tokens)

    def _store_context(self, num_tokens: int, num_graph_reqs: int | None, is_dummy: bool) -> None:
        """Cache the accepted entries that no graph will cache."""
        if num_graph_reqs is None:
            self._precompute_context_kv(0, num_tokens, is_dummy)
            return
        in_graph = self._num_graph_context_tokens(num_graph_reqs)
        if is_dummy:  # its block tables may be stale
            self._context_slot_mappings[:, :in_graph].fill_(PAD_SLOT_ID)
        elif num_tokens <= in_graph:
            self._context_slot_mappings[:, num_tokens:in_graph].fill_(PAD_SLOT_ID)
        else:
            self._precompute_context_kv(in_graph, num_tokens)

    def _precompute_context_kv(self, start: int, end: int, dummy_run: bool = False) -> None:
        """Write keys and values of target rows [start, end); a dummy run computes them and writes nothing."""
        if self.settings.starts_from_last_token and not dummy_run:
            return  # such rounds bring only the last accepted entries, which are query rows
        rows = slice(start, end)
        write_entries(
            self.model.model,
            self.hidden_states[rows],
            self.context_tokens[rows],
            self.context_positions[rows],
            None if dummy_run else self._context_slot_mappings[0][rows],
        )

    def run_block(
        self, num_reqs: int, num_tokens_padded: int, *told: Any, **options: Any
    ) -> tuple[torch.Tensor, NoiseKeys | None]:
        """Final states [num_reqs * K, H] of all query rows, and the keys of their noise."""
        num_rows = num_reqs * self.num_query_per_req
        with run.forward_context(self, num_rows, *told, **options):
            states = self.model(
                input_ids=self.entry_tokens[:num_reqs],
                positions=self.input_buffers.positions[:num_rows],
                hidden_states=self.hidden_states.index_select(0, self.entry_rows[:num_reqs]),
                num_queries=self.num_query_per_req,
            )
        return states, self.row_keys(num_rows)

    def _generate_draft(self, num_reqs: int, *arguments: Any, **options: Any) -> None:
        """Run the forward and choose the best token at every position (arguments are vLLM's)."""
        tokens = self.head.choose(*self.run_block(num_reqs, *arguments, **options))
        self.draft_tokens[:num_reqs] = tokens.view(num_reqs, -1)


class DartTreeProposer(MarginalTreeProposer, DartProposer):
    """Trees from the same forward; by default the paper's, pruned by n-grams (section 4)."""
