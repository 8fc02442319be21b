"""ConFu as a proposer: EAGLE-3's trees, whose nodes see one future token (Qin et al. 2026, section 3.1)."""

import functools
from typing import Any

import torch
from vllm.config import VllmConfig

from vllm_crossspec.config.schema import CrossSpecConfig
from vllm_crossspec.drafters.eagle3.tree_proposer import Eagle3TreeProposer
from vllm_crossspec.drafting.level_trees import LevelPass
from vllm_crossspec.drafting.one_layer import write_entries
from vllm_crossspec.trees.builders.dynamic import Beam
from vllm_crossspec.types import Futures


class ConfuProposer(Eagle3TreeProposer):
    """Trees of ConFu's drafter.

    Differences from ``Eagle3TreeProposer``:

    - The first pass only writes the accepted tokens' keys and values: no attention, no MLP.
    - A separate pass drafts from the root with the future; it is the first in the levels' graph.
    - Every level has one more row per request after its nodes: the future. Its key is rotated to the position after the
      level. It is in the first row of the tree's scratch, which all nodes see.
    - A projection of the future is added to every node's input state.
    - A chain is a tree with one node per level.
    """

    contemplates = True
    shared_rows = 1

    def __init__(self, vllm_config: VllmConfig, device: torch.device, name: str, settings: CrossSpecConfig):
        super().__init__(vllm_config, device, name, settings)
        config = self.draft_model_config.hf_config
        if config.num_hidden_layers != 1:  # a second layer's keys would need the first's attention
            raise ValueError(
                f"speculative_config.model: {self.draft_model_config.model} has {config.num_hidden_layers} layers; "
                "a ConFu drafter has one"
            )
        # Models overwrite their input states, so every level copies the futures' states from here.
        self.future_states = torch.zeros(self.max_num_reqs, self.hidden_size, dtype=self.dtype, device=device)
        self.prepare_level = functools.partial(self.prepare_level, future_states=self.future_states)
        self.futures: Futures | None = None
        most, hidden, ints = self.max_num_reqs, self.hidden_size, {"dtype": torch.int32, "device": device}
        self.root_ids = torch.zeros(most, **ints)
        self.no_ids = torch.zeros(len(self.level_positions), **ints)
        self.level_embeds = torch.zeros(most, self.level_rows, hidden, dtype=self.dtype, device=device)
        self.skips = torch.zeros(most, 1, hidden, dtype=self.dtype, device=device)
        self.level_masks = torch.zeros(most, self.level_rows, self.builder.mask_words, **ints)
        self.level_masks[:, -1, 0] = 1  # in the scratch a future sees only itself
        self.root_masks = self.level_masks[:1, -1:].clone()
        self.root_parents = torch.zeros(most, self.builder.top_k, **ints)

    def _run_model(
        self, num_tokens: int, attn_metadata: Any, slot_mappings: dict[str, torch.Tensor] | None, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first pass (vLLM's arguments): writes keys and values of all rows; returns features as states."""
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
        """Keep the roots' tokens for :meth:`_grow`, which drafts (arguments are vLLM's)."""
        num_reqs = hidden_states.shape[0]
        self.root_ids[:num_reqs] = self.input_buffers.input_ids[self.last_token_indices[:num_reqs]]
        return self.root_tokens[:num_reqs, 0]

    def _grow(self, num_reqs: int, told: LevelPass) -> None:
        self._take_futures(num_reqs)
        ids = self.root_ids[:num_reqs, None].expand(-1, self.builder.top_k)
        root = Beam(ids, self.root_parents[:num_reqs], self.root_log_probs[:num_reqs], self.root_masks)
        out, states, positions = self._forward_beam(0, root, self.hidden_states[:num_reqs], told)
        first = slice(None, None, self.builder.top_k)  # all rows of a request are the root
        keys = self.coupling(self.idx_mapping[:num_reqs], positions[first] + 1, self.temperature, self.seeds)
        log_probs, tokens = self.head.candidates(out[first], keys, self.builder.top_k)
        self.root_log_probs[:num_reqs], self.root_tokens[:num_reqs] = log_probs, tokens
        self.hidden_states[:num_reqs] = states[first]
        super()._grow(num_reqs, told)

    def _take_futures(self, num_reqs: int) -> None:
        """Prepare each request's future row: its state, and the embedding that the root's state chooses."""
        futures, model, states = self.futures, self.model, self.future_states[:num_reqs]
        assert futures is not None
        slots = self.idx_mapping[:num_reqs].clamp(min=0)
        has_future = futures.present.index_select(0, slots)[:, None] > 0
        states.copy_(torch.where(has_future, futures.states.index_select(0, slots), model.no_future_embed))
        self.level_embeds[:num_reqs, -1] = model.future_embed(self.hidden_states[:num_reqs])
        self.skips[:num_reqs, 0] = model.future_skip(states)

    def _forward_beam(
        self, level: int, beam: Beam, states: torch.Tensor, told: LevelPass
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # Level 0 is the root, whose keys and values are in the paged cache.
        num_reqs, top_k = beam.tokens.shape
        rows = num_reqs * self.level_rows
        level_states = self._prepare_beam(level, beam, states)[:rows]
        level_states.view(num_reqs, self.level_rows, -1)[:, :top_k] += self.skips[:num_reqs]
        embeds, masks = self.level_embeds[:num_reqs], self.level_masks[:num_reqs]
        embeds[:, :top_k] = self.model.embed_input_ids(beam.tokens.reshape(-1)).view(num_reqs, top_k, -1)
        masks[:, :top_k] = beam.masks
        self._attach_tails(told, max(level, 1), num_reqs, masks)
        out, states = self._forward_level(self.no_ids[:rows], level_states, told, embeds.view(rows, -1))
        nodes = [x.view(num_reqs, self.level_rows, -1)[:, :top_k].reshape(num_reqs * top_k, -1) for x in (out, states)]
        positions = self.level_positions[:rows].view(num_reqs, -1)[:, :top_k].reshape(-1)
        return nodes[0], nodes[1], positions
