"""Draft trees over vLLM's paged KV cache: masks before the forward pass, moving the accepted path after it."""

from typing import Any

import torch
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState

from vllm_crossspec.graphs.query_lens import captured_query_len
from vllm_crossspec.step.feature import Feature
from vllm_crossspec.step.step import Step
from vllm_crossspec.trees.attention import base
from vllm_crossspec.trees.commit import kernels
from vllm_crossspec.trees.penalties_state import TreePenalties
from vllm_crossspec.types import AcceptedPaths

NATIVE_PROCESSORS = 3
"""Number of vLLM's own logits processors (bias, penalties, bad words); the rest are the user's."""


class Trees(Feature):
    """Does for trees what vLLM does for chains between the target's forward pass and the drafter's next round.

    Tree rows see only their ancestors. After verification the accepted path moves to where an accepted chain would be,
    in every target layer's KV cache and in the states that drafters read.
    """

    name = "trees"

    def __init__(self, runner: Any):
        super().__init__(runner)
        self._kv_layers: kernels.KVLayers
        base.register()
        base.set_tree_source(self.tail_of_step)

    @staticmethod
    def is_wanted(runner: Any) -> bool:
        return runner.settings.has_trees

    @staticmethod
    def left_out() -> None:
        base.unregister()

    def loaded(self) -> None:
        """Refuse attention without tree support, and make penalties follow the trees."""
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
        """Collect the KV caches of all target layers."""
        runner = self.runner
        layers = runner.compilation_config.static_forward_context
        caches = []
        for group, spec in enumerate(runner.kv_cache_config.kv_cache_groups):
            for name in spec.layer_names:
                layer = layers[name]
                if not layer.is_draft_layer:
                    caches += [(part, group) for part in layer.impl.kv_views(layer.kv_cache)]
        self._kv_layers = kernels.make_kv_layers(caches)

    def tail_of_step(self, common: Any, capturing: bool) -> base.TargetTail | None:
        """The step's trees (:func:`base.set_tree_source`); None if no request has drafts."""
        runner = self.runner
        state, step, max_query_len = runner.draft_state, runner.step, common.max_query_len
        num_reqs, num_tokens = common.num_reqs, common.num_actual_tokens
        if capturing:
            if max_query_len <= 1:
                return None
        elif step is not None and step.has_drafts:
            batch = step.batch
            # Verification requests lead the batch (vLLM sorts it so).
            leading = int((batch.num_draft_tokens_per_req > 0).sum())
            # A graph for mixed widths also takes single rows without drafts, and has no other path for them.
            mixes = any(feature.mixes_widths for feature in runner.features.values())
            if leading < batch.num_reqs and not (mixes and (batch.num_scheduled_tokens[leading:] == 1).all()):
                num_reqs, num_tokens = leading, int(batch.query_start_loc_np[leading])
            max_query_len = captured_query_len(runner.cudagraph_manager) or max_query_len
        else:
            return None
        sizes = (num_reqs, num_tokens, min(max_query_len, state.num_rows))
        return base.TargetTail(state.prefix_len, state.row_mask, *sizes, is_whole_batch=num_reqs >= common.num_reqs)

    def sampled(self, step: Step, final_states: torch.Tensor) -> None:
        """Move K, V, states and ids of each accepted path to a chain's rows: three launches for up to eight states."""
        if not step.has_drafts:
            return
        state, batch = self.runner.draft_state, step.batch
        paths = AcceptedPaths(batch.query_start_loc, step.cu_rows, step.num_sampled, state.path)
        kernels.compact_kv(self._kv_layers, paths, self.runner.block_tables.slot_mappings)
        # A model may return one tensor as two states (its last layer's and the final one); move it once.
        states = list({state.data_ptr(): state for state in (final_states, *step.tapped)}.values())
        for first in range(0, len(states), kernels.MAX_TENSORS):
            kernels.compact_rows(states[first : first + kernels.MAX_TENSORS], paths)
        kernels.restore_rows(paths, seq_lens=batch.seq_lens, positions=batch.positions, input_ids=batch.input_ids)
