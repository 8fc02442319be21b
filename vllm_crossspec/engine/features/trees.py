"""Draft trees over vLLM's paged KV cache: masks before the forward pass, the accepted path moved after it."""

from typing import Any

import torch
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState

from vllm_crossspec.engine.attention import base
from vllm_crossspec.engine.features.base import Feature
from vllm_crossspec.engine.graphs.query_lens import captured_query_len
from vllm_crossspec.engine.step import Step
from vllm_crossspec.engine.verification.penalties import TreePenalties
from vllm_crossspec.kv_compaction.kernels import (
    MAX_TENSORS,
    KVLayers,
    compact_kv,
    compact_rows,
    make_kv_layers,
    restore_rows,
)
from vllm_crossspec.types import AcceptedPaths

NATIVE_PROCESSORS = 3
"""vLLM's own logits processors (bias, penalties, bad words); the rest are the user's."""


class Trees(Feature):
    """Everything between the target's forward pass and the drafter's next round that vLLM does for chains.

    The rows of trees see their ancestors alone. After verification the accepted path moves to where an accepted chain
    would be, in the KV cache of every target layer and in the states that drafters read.
    """

    name = "trees"

    def __init__(self, runner: Any):
        super().__init__(runner)
        self._kv_layers: KVLayers
        base.register()
        base.set_tree_source(self.tail_of_step)

    @staticmethod
    def is_wanted(runner: Any) -> bool:
        """See the base class."""
        return runner.settings.has_trees

    @staticmethod
    def left_out() -> None:
        """See the base class."""
        base.unregister()

    def loaded(self) -> None:
        """Refuse attention that has no trees, and penalize along them."""
        runner = self.runner
        over_trees = [p for p in runner.speculator.proposers.values() if p.drafts_over_trees]
        layers = set().union(*(p.draft_attn_layer_names for p in over_trees))
        base.check_backends(runner.vllm_config, draft_layers=layers)
        sampler = runner.sampler
        penalties = TreePenalties(sampler.penalties_state, runner.draft_state)
        sampler.logits_processors = [
            penalties if isinstance(processor, PenaltiesState) else processor for processor in sampler.logits_processors
        ]
        runner.rejection_sampler.penalties = penalties
        # A custom logits processor expects the rows of a chain.
        runner.chains_only = len(sampler.logits_processors) > NATIVE_PROCESSORS

    def kv_ready(self) -> None:
        """Note where the K and V of every target layer lie."""
        runner = self.runner
        layers = runner.compilation_config.static_forward_context
        caches = []
        for group, spec in enumerate(runner.kv_cache_config.kv_cache_groups):
            for name in spec.layer_names:
                layer = layers[name]
                if not layer.is_draft_layer:
                    caches += [(part, group) for part in layer.impl.kv_views(layer.kv_cache)]
        self._kv_layers = make_kv_layers(caches)

    def tail_of_step(self, common: Any, capturing: bool) -> base.TargetTail | None:
        """The step's trees for the metadata builders of the attention; None where no request brought drafts.

        Args:
            common: vLLM's common attention metadata.
            capturing: whether a CUDA graph of a uniform verification batch is being captured.
        """
        runner = self.runner
        state, step, max_query_len = runner.draft_state, runner.step, common.max_query_len
        if capturing:
            if common.max_query_len <= 1:
                return None
            num_reqs, num_tokens = common.num_reqs, common.num_actual_tokens
        elif step is not None and step.has_drafts:
            batch = step.batch
            # Verification requests lead the batch (vLLM sorts it so).
            num_reqs = int((batch.num_draft_tokens_per_req > 0).sum())
            num_tokens = int(batch.query_start_loc_np[num_reqs])
            # A graph for several widths takes single rows without drafts, too, and has no other path for them.
            mixes = any(feature.mixes_widths for feature in runner.features.values())
            if num_reqs == batch.num_reqs or (mixes and (batch.num_scheduled_tokens[num_reqs:] == 1).all()):
                num_reqs, num_tokens = common.num_reqs, common.num_actual_tokens
            max_query_len = captured_query_len(runner.cudagraph_manager) or max_query_len
        else:
            return None
        return base.TargetTail(
            prefix_len=state.prefix_len,
            row_mask=state.row_mask,
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            max_query_len=min(max_query_len, state.num_rows),
            is_whole_batch=num_reqs >= common.num_reqs,
        )

    def sampled(self, step: Step, final_states: torch.Tensor) -> None:
        """Move K, V, states and ids of each accepted path to the rows of an accepted chain.

        Three launches, and one more for every eight tapped states.
        """
        if not step.has_drafts:
            return
        state, batch = self.runner.draft_state, step.batch
        paths = AcceptedPaths(batch.query_start_loc, step.cu_rows, state.num_sampled, state.path)
        compact_kv(self._kv_layers, paths, self.runner.block_tables.slot_mappings)
        states = [final_states, *step.tapped]
        for first in range(0, len(states), MAX_TENSORS):
            compact_rows(states[first : first + MAX_TENSORS], paths)
        restore_rows(paths, seq_lens=batch.seq_lens, positions=batch.positions, input_ids=batch.input_ids)
