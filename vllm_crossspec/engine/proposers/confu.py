"""ConFu as a proposer: EAGLE-3's trees, every node of which sees one future token (Qin et al. 2026, section 3.1)."""

import functools
from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig

from vllm_crossspec.engine.draft_settings import DraftSettings
from vllm_crossspec.engine.proposers.eagle3_tree import Eagle3TreeProposer
from vllm_crossspec.engine.proposers.one_layer import write_entries
from vllm_crossspec.tree.dynamic import Beam
from vllm_crossspec.types import Futures


class ConfuProposer(Eagle3TreeProposer):
    """Drafts as EAGLE-3 does, with the future token kept last: at every level it stands right behind the nodes.

    The first pass only takes the accepted tokens into the cache: keys and values, no attention and no MLP. The root is
    drafted by a pass of its own, with the future, which is the first of the levels' graph. Every level's pass has one
    row a request beside its nodes, the future's; its key is rotated to the place behind the level, and lies in the
    first row of the tree's scratch, where all nodes see it. A projection of the future is added to the state that
    every node starts from. A chain is a tree of one node a level.
    """

    contemplates = True
    shared_rows = 1

    def __init__(self, vllm_config: VllmConfig, device: torch.device, name: str, drafts: DraftSettings):
        super().__init__(vllm_config, device, name, drafts)
        config = self.draft_model_config.hf_config
        if config.num_hidden_layers != 1:  # a second layer's keys would need the first's attention
            raise ValueError(
                f"speculative_config.model: {self.draft_model_config.model} has {config.num_hidden_layers} layers; "
                "a ConFu drafter has one"
            )
        # Models write over the states that they are given, so that every level begins with the futures' own.
        self.future_states = torch.zeros(self.max_num_reqs, self.hidden_size, dtype=self.dtype, device=device)
        self.prepare_level = functools.partial(self.prepare_level, future_states=self.future_states)
        top_k, max_rows = self.builder.top_k, self.level_positions.shape[0]
        self.futures: Futures | None = None
        self.root_ids = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=device)
        self.no_ids = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.level_embeds = torch.zeros(
            self.max_num_reqs, self.level_rows, self.hidden_size, dtype=self.dtype, device=device
        )
        self.skips = torch.zeros(self.max_num_reqs, 1, self.hidden_size, dtype=self.dtype, device=device)
        mask_shape = (self.max_num_reqs, self.level_rows, self.builder.mask_words)
        self.level_masks = torch.zeros(mask_shape, dtype=torch.int32, device=device)
        self.level_masks[:, -1, 0] = 1  # of the scratch, a future sees itself alone
        self.root_masks = self.level_masks[:1, -1:].clone()
        self.root_parents = torch.zeros(self.max_num_reqs, top_k, dtype=torch.int32, device=device)

    # -- the round ------------------------------------------------------------------------------------------------

    def _run_model(
        self,
        num_tokens: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
        mm_inputs: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first pass, vLLM's arguments: keys and values of all rows; their features stand for the states."""
        features = self.hidden_states[:num_tokens]
        layer = next(iter(self.draft_attn_layer_names))
        write_entries(
            self.model.model,
            features,
            self.input_buffers.input_ids[:num_tokens],
            self.input_buffers.positions[:num_tokens],
            None if slot_mappings is None else slot_mappings[layer][:num_tokens],
        )
        return features, features

    def sample_draft(self, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        """Keep the roots' tokens for :meth:`_grow`; nothing is drafted yet (arguments are vLLM's)."""
        num_reqs = hidden_states.shape[0]
        self.root_ids[:num_reqs] = self.input_buffers.input_ids[self.last_token_indices[:num_reqs]]
        return self.root_tokens[:num_reqs, 0]

    def _grow(
        self,
        num_reqs: int,
        attn_metadata: dict[str, Any] | None,
        num_tokens_across_dp: torch.Tensor | None,
        depth: int | None = None,
    ) -> None:
        """The root's candidates, then the levels; arguments as of the base class."""
        self._take_futures(num_reqs)
        ids = self.root_ids[:num_reqs, None].expand(-1, self.builder.top_k)
        root = Beam(ids, self.root_parents[:num_reqs], self.root_log_probs[:num_reqs], self.root_masks)
        features = self.hidden_states[:num_reqs]
        out, states, positions = self._forward_beam(0, root, features, attn_metadata, num_tokens_across_dp)
        first = slice(None, None, self.builder.top_k)  # all of a request's rows are the root
        keys = self.coupling(self.idx_mapping[:num_reqs], positions[first] + 1, self.temperature, self.seeds)
        log_probs, tokens = self.head.candidates(out[first], keys, self.builder.top_k)
        self.root_log_probs[:num_reqs], self.root_tokens[:num_reqs] = log_probs, tokens
        self.hidden_states[:num_reqs] = states[first]
        super()._grow(num_reqs, attn_metadata, num_tokens_across_dp, depth)

    def _take_futures(self, num_reqs: int) -> None:
        """Each request's future, the last row of its levels: the state, and the embedding that its root chooses."""
        futures, model, states = self.futures, self.model, self.future_states[:num_reqs]
        assert futures is not None
        slots = self.idx_mapping[:num_reqs].clamp(min=0)
        has_future = futures.present.index_select(0, slots)[:, None] > 0
        states.copy_(torch.where(has_future, futures.states.index_select(0, slots), model.no_future_embed))
        self.level_embeds[:num_reqs, -1] = model.future_embed(self.hidden_states[:num_reqs])
        self.skips[:num_reqs, 0] = model.future_skip(states)

    def _forward_beam(
        self,
        level: int,
        beam: Beam,
        states: torch.Tensor,
        attn_metadata: dict[str, Any] | None,
        num_tokens_across_dp: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See the base class; level 0 is the root, whose own keys and values are in the paged cache."""
        num_reqs, top_k = beam.tokens.shape
        rows = num_reqs * self.level_rows
        level_states = self._prepare_beam(level, beam, states)[:rows]
        level_states.view(num_reqs, self.level_rows, -1)[:, :top_k] += self.skips[:num_reqs]
        embeds, masks = self.level_embeds[:num_reqs], self.level_masks[:num_reqs]
        embeds[:, :top_k] = self.model.embed_input_ids(beam.tokens.reshape(-1)).view(num_reqs, top_k, -1)
        masks[:, :top_k] = beam.masks
        self._attach_tails(attn_metadata, max(level, 1), num_reqs, masks)
        out, states = self._forward_level(
            self.no_ids[:rows], level_states, attn_metadata, num_tokens_across_dp, embeds.view(rows, -1)
        )
        nodes = [x.view(num_reqs, self.level_rows, -1)[:, :top_k].reshape(num_reqs * top_k, -1) for x in (out, states)]
        positions = self.level_positions[:rows].view(num_reqs, -1)[:, :top_k].reshape(-1)
        return nodes[0], nodes[1], positions
