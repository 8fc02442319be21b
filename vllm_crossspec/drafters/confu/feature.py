"""The target's side of ConFu: contemplate rows in its batch, and their results for the next round (section 3.1).

Shape legend: S request slots, R requests of the batch, T token rows of the step, H hidden size of the target.

A step with drafts has a contemplate row for every row that it verifies (``contemplate_layout``). Contemplate rows get
no logits. Their embeddings come from a mixture of experts instead of the vocabulary, and their attention sees the soft
prompts. After verification the contemplate row of the last accepted token gives the drafter's future. The last accepted
token's own states choose the next round's embedding.

A prompt's last row has no contemplate row, because a prompt's rows are not a tail and use vLLM's own attention. So the
first round of a request drafts without a future.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_crossspec.drafters.confu import kernels
from vllm_crossspec.kinds.contemplate_layout import verified_nodes
from vllm_crossspec.step.feature import Feature
from vllm_crossspec.step.step import Step
from vllm_crossspec.trees.attention.base import dtype_beside_cache
from vllm_crossspec.types import AcceptedPaths, Futures
from vllm_crossspec.vllm_api.grammar import MASKS_FOLLOW_DRAFTS

logger = init_logger("vllm.crossspec")


class Contemplate(Feature):
    """Contemplate rows of one engine.

    Attributes:
        futures: [S, H] final state of the contemplate row of each slot's last accepted token.
        has_future: int32 [S] whether there was one.
        embeds: [S, H] embedding of each slot's next contemplate rows.
        inputs_embeds: [rows, H] the target's input instead of token ids.
    """

    name = "contemplate"

    @staticmethod
    def is_wanted(runner: Any) -> bool:
        return runner.settings.contemplates

    @property
    def num_soft_prompts(self) -> int:  # type: ignore[override]
        """s of the ConFu drafter."""
        configs = (p.speculative_config.draft_model_config for p in self.runner.speculator.proposers.values())
        return max((getattr(c.hf_config, "num_soft_prompts", 0) for c in configs if c is not None), default=0)

    def loaded(self) -> None:
        """Give the target its soft prompts and have it read embeddings."""
        runner, settings = self.runner, self.runner.settings
        self.drafter = name = next(n for n, d in settings.drafters.items() if d.traits.contemplates)
        proposer, state = runner.speculator.proposers[name], runner.draft_state
        self.model, self.taps = proposer.model, runner.speculator.tap_indices[name]
        self._allocate(self.model.contemplate_embed.experts.shape[1])
        self.soft_bytes = self._place_soft_prompts()
        runner.model_state.embeds, runner.model_state.embeds_natively = self.inputs_embeds, runner.uses_inputs_embeds
        runner.uses_inputs_embeds = True
        proposer.futures = Futures(self.futures, self.has_future)
        logger.info(
            "crossspec: the target contemplates for %s: up to %d rows of a request in a step (%d draft nodes, the last "
            "token and a contemplate row for each), %d soft prompts a layer; %.1f MiB",
            name,
            state.num_rows,
            state.num_nodes,
            self.model.soft_prompts.keys.shape[2],
            self.num_bytes / 2**20,
        )

    def swapped(self, names: Sequence[str]) -> None:
        # The target's layers have copies of the soft prompts, whose addresses CUDA graphs hold.
        if self.drafter in names:
            self._place_soft_prompts()

    def _allocate(self, hidden: int) -> None:
        runner, state = self.runner, self.runner.draft_state
        max_num_reqs, max_num_tokens = runner.max_num_reqs, runner.max_num_tokens
        dtype, device = runner.dtype, runner.device
        self.futures, self.embeds = (torch.zeros(max_num_reqs, hidden, dtype=dtype, device=device) for _ in range(2))
        self.has_future = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self.inputs_embeds = torch.zeros(max_num_tokens, hidden, dtype=dtype, device=device)
        # The step's logits rows: the roots and the draft nodes.
        max_logits = min(max_num_reqs * (state.num_nodes + 1), max_num_tokens)
        self._rows, self._slots = (torch.zeros(max_logits, dtype=torch.int64, device=device) for _ in range(2))
        self._places = torch.zeros(max_logits, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """Memory besides the drafter's weights: the buffers, and the target layers' copies of the soft prompts."""
        own = (self.futures, self.embeds, self.has_future, self.inputs_embeds, self._rows, self._slots, self._places)
        return sum(x.nbytes for x in own) + self.soft_bytes

    # -- what the target sees -----------------------------------------------------------------------------------

    def _place_soft_prompts(self) -> int:
        """Copy the soft prompts of this rank's heads into each target layer, at fixed addresses; return the bytes."""
        prompts = self.model.soft_prompts
        # vLLM's forward context holds more than attention layers, for example a target's experts.
        layers = get_layers_from_vllm_config(self.runner.vllm_config, AttentionLayerBase)
        targets = {extract_layer_index(name): layer for name, layer in layers.items() if not layer.is_draft_layer}
        rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        num_bytes, total = 0, prompts.keys.shape[1]
        for index, layer in targets.items():
            count = layer.num_kv_heads
            first = rank * count if total >= size else rank * total // size
            both = torch.stack([prompts.keys[index], prompts.values[index]])[:, first : first + count]
            both = both.to(dtype_beside_cache(layer)).contiguous()
            if getattr(layer, "soft_prompts", None) is None:
                layer.soft_prompts = both
            layer.soft_prompts.copy_(both)
            num_bytes += layer.soft_prompts.nbytes
        return num_bytes

    def embedded(self, batch: Any) -> None:
        step = self.runner.step
        if step is None or step.planned_rows is None:
            return
        kernels.write_contemplate_rows(
            embeds=self.inputs_embeds,
            contemplate_embeds=self.embeds,
            idx_mapping=batch.idx_mapping,
            query_start_loc=batch.query_start_loc,
            cu_rows=step.planned_rows,
            max_rows=self.runner.draft_state.num_rows,
        )

    def added(self, requests: Sequence[Any], slots: list[int]) -> None:
        # New requests have no future and no embedding.
        on_device = async_tensor_h2d(np.array(slots, dtype=np.int64), device=self.runner.device)
        self.has_future.index_fill_(0, on_device, 0)
        self.embeds.index_fill_(0, on_device, 0)

    # -- the step -----------------------------------------------------------------------------------------------

    def split(self, step: Step) -> None:
        """Take logits of the root and the draft nodes only; counts of draft tokens still include contemplate rows."""
        if not step.has_drafts:
            return
        batch = step.batch
        step.planned_rows, num_reqs = batch.cu_num_logits, batch.num_reqs
        # ``layout.verified_nodes`` of each request's draft tokens, and the root.
        counts = np.maximum(batch.num_draft_tokens_per_req - 1, 0) // 2 + 1
        starts = np.zeros(num_reqs + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        cu_nodes = async_tensor_h2d(starts, device=self.runner.device)
        num_logits = int(starts[-1])
        rows, slots, places = (x[:num_logits] for x in (self._rows, self._slots, self._places))
        kernels.split_rows(
            query_start_loc=batch.query_start_loc,
            cu_rows=batch.cu_num_logits,
            cu_nodes=cu_nodes,
            idx_mapping=batch.idx_mapping,
            logits_indices=rows,
            expanded_idx_mapping=slots,
            expanded_local_pos=places,
        )
        step.batch = dataclasses.replace(
            batch,
            logits_indices=rows,
            expanded_idx_mapping=slots,
            expanded_local_pos=places,
            cu_num_logits=cu_nodes,
            cu_num_logits_np=starts,
        )

    def before_sampling(self, step: Step, batch: Any, grammar_output: Any) -> tuple[Any, Any]:
        """Hide contemplate rows from sampling and grammars: only draft nodes count as draft tokens."""
        if step.planned_rows is None:
            return batch, grammar_output
        if grammar_output is not None and MASKS_FOLLOW_DRAFTS:
            grammar_output = self._masks_of(batch, grammar_output)
        return dataclasses.replace(batch, num_draft_tokens_per_req=np.diff(batch.cu_num_logits_np) - 1), grammar_output

    def _masks_of(self, batch: Any, grammar_output: Any) -> Any:
        """The scheduler's grammar masks, which cover all planned rows, without those of contemplate rows."""
        numbers = {req_id: index for index, req_id in enumerate(batch.req_ids)}
        kept, first = [], 0
        for req_id in grammar_output.structured_output_request_ids:
            planned = int(batch.num_draft_tokens_per_req[numbers[req_id]]) + 1
            kept.append(np.arange(first, first + verified_nodes(planned - 1, True) + 1))
            first += planned
        masks = grammar_output.grammar_bitmask[np.concatenate(kept)] if kept else grammar_output.grammar_bitmask
        return dataclasses.replace(grammar_output, grammar_bitmask=masks)

    def sampled(self, step: Step, final_states: torch.Tensor) -> None:
        """Keep the futures of the last accepted rows, and the next contemplate rows' embeddings."""
        if not step.tapped:
            return
        mixture, batch, state = self.model.contemplate_embed, step.batch, self.runner.draft_state
        kernels.contemplate(
            final_states=final_states,
            taps=[step.tapped[i] for i in self.taps],
            idx_mapping=batch.idx_mapping,
            paths=AcceptedPaths(batch.query_start_loc, step.cu_rows, step.num_sampled, state.path),
            router=mixture.router,
            experts=mixture.experts,
            top=mixture.top,
            contemplate_embeds=self.embeds,
            futures=self.futures,
            has_future=self.has_future,
        )
