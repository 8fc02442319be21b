"""Trees of an autoregressive drafter: every level's nodes of all requests in one forward of its model."""

import dataclasses
import functools
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from vllm_crossspec.adaptive.calibration import load_policy
from vllm_crossspec.adaptive.sizer import TreeSizer
from vllm_crossspec.contemplate.layout import verified_nodes
from vllm_crossspec.drafters.eagle3.levels import prepare_growth
from vllm_crossspec.engine.attention.base import DraftTail, dtype_beside_cache
from vllm_crossspec.engine.draft_settings import DraftSettings
from vllm_crossspec.engine.graphs.rows import RowGraphManager
from vllm_crossspec.engine.proposers.base import Proposer, empty_tree, first_rows
from vllm_crossspec.engine.vllm_api import run
from vllm_crossspec.tree.base import tree_kind
from vllm_crossspec.tree.dynamic import Beam
from vllm_crossspec.types import Candidates, Sizing, StepInputs


class LevelTrees(Proposer):
    """Expands the likeliest nodes level by level and keeps the best (EAGLE-2, section 4; EAGLE-3, section 3).

    Stands before the proposer of chains whose model drafts. Its first pass takes the accepted tokens into the paged
    cache and gives the root's candidates. Each further level is one forward over k rows a request, which see the paged
    cache and, in a scratch of their own for every layer, their ancestors. Nothing of a tree goes into the paged cache,
    so it needs no slots there and leaves no traces. All levels are one CUDA graph.

    Trees that are sized by request and round (HeteroSpec, section 4.3) are two: one of the ordinary levels, at whose
    end the host learns the bins, and one of the further levels that the batch's surest request asks for.
    """

    drafts_over_trees = True
    shared_rows = 0
    """Rows of a request beside a level's nodes, which all of these see."""
    token_offset = 0
    """Places of a row's token behind the row's own position."""
    tokens_ahead = 0
    """Tokens of a request that are in the drafter's cache after the first pass, and not yet in the target's."""

    device: torch.device
    input_buffers: Any
    idx_mapping: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    arange_np: npt.NDArray[np.int32]
    max_model_len: int
    kv_cache_config: Any
    hidden_states: torch.Tensor
    # vLLM's own.
    _build_attn_metadata: Callable[..., dict[str, Any] | None]
    _prepare_eplb_forward: Callable[[int], None]
    _update_draft_decode_metadata: Callable[[dict[str, Any], int], None]

    def __init__(self, vllm_config: VllmConfig, device: torch.device, name: str, drafts: DraftSettings):
        super().__init__(vllm_config, device, name, drafts)  # type: ignore[call-arg]
        assert drafts.tree is not None and drafts.top_k is not None and drafts.tree_nodes is not None
        top_k, max_num_reqs = drafts.top_k, self.max_num_reqs
        self.tree = empty_tree(max_num_reqs, drafts.num_nodes, device)
        self.sizer: TreeSizer | None = None
        self.max_depth = drafts.depth
        if drafts.adaptive is not None:
            policy = load_policy(drafts.adaptive, drafts.tree_nodes)
            self.sizer = TreeSizer(policy, drafts.depth, max_num_reqs, device)
            self.max_depth += policy.max_extension
        self.builder = tree_kind(drafts.tree.type, "tree.type").load_builder()(
            num_nodes=drafts.tree_nodes,
            depth=self.max_depth,
            top_k=top_k,
            max_num_reqs=max_num_reqs,
            device=device,
            first_row=self.shared_rows,
        )
        self.level_rows = top_k + self.shared_rows
        max_rows = max_num_reqs * self.level_rows
        self.root_log_probs = torch.zeros(max_num_reqs, top_k, dtype=torch.float32, device=device)
        self.root_tokens = torch.zeros(max_num_reqs, top_k, dtype=torch.int64, device=device)
        self.level_positions = torch.zeros(max_rows, dtype=torch.int64, device=device)
        # Of the first pass's type: a compiled model takes the types that it was traced with, and looks at them no more.
        self.level_ids = torch.zeros(max_rows, dtype=self.input_buffers.input_ids.dtype, device=device)
        levels = torch.arange(1, self.max_depth + 1, dtype=torch.int32, device=device)
        self.tail_lengths = self.shared_rows + top_k * levels
        # The states of the last ordinary level, for the levels beyond it, which another graph holds.
        kept_rows = max_num_reqs * top_k if self.max_depth > drafts.depth else 0
        self.last_states = torch.zeros(kept_rows, self.state_size, dtype=self.dtype, device=device)
        self.scratches: dict[str, torch.Tensor] = {}
        self.level_cudagraph_manager: RowGraphManager | None = None
        self.extension_managers: dict[int, RowGraphManager] = {}

    # -- loading ----------------------------------------------------------------------------------------------

    def load_model(self, target_model: nn.Module) -> None:
        """The model, and a scratch for its trees: this early, so that vLLM's memory profile knows of it."""
        super().load_model(target_model)
        self._make_scratches()

    def borrow(self, owner: Proposer, target_model: nn.Module) -> None:
        """See the base class; a scratch is one's own."""
        super().borrow(owner, target_model)
        self._make_scratches()

    def _make_scratches(self) -> None:
        """Room for the keys and values of the trees of all requests, in each layer."""
        layers = self.vllm_config.compilation_config.static_forward_context
        rows = self.shared_rows + (self.max_depth - 1) * self.builder.top_k
        for name in self.draft_attn_layer_names:
            layer = layers[name]
            shape = (self.max_num_reqs, max(rows, 1), 2, layer.num_kv_heads, layer.head_size)
            self.scratches[name] = torch.zeros(shape, dtype=dtype_beside_cache(layer), device=self.device)

    def set_attn(self, *arguments: Any, **options: Any) -> None:
        """The attention of the drafter's layers; none of a tree's rows has a slot in their cache."""
        super().set_attn(*arguments, **options)
        num_groups = len(self.kv_cache_config.kv_cache_groups)
        max_rows = self.level_positions.shape[0]
        self.no_slots = torch.full((num_groups, max_rows), PAD_SLOT_ID, dtype=torch.int64, device=self.device)

    @property
    def state_size(self) -> int:
        """H of what a node hands on to its children beside keys and values."""
        return self.hidden_size

    @property
    def head_rows_per_req(self) -> int:
        """A level's."""
        return self.builder.top_k

    # -- CUDA graphs ------------------------------------------------------------------------------------------

    @staticmethod
    def native_steps(drafts: DraftSettings) -> int:
        """To vLLM's class this is a drafter of one token: its first pass. The rest is done here."""
        return 1

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """One graph for all levels, by batch size, beside the first pass's; one more for each further depth."""
        super().init_cudagraph_manager(cudagraph_mode)
        manager = functools.partial(RowGraphManager, self, cudagraph_mode, self.level_rows, causal=False)
        self.level_cudagraph_manager = manager(prepare=self._plan_growth)
        extensions = self.sizer.policy.extensions if self.sizer is not None and self.grows_on else ()
        self.extension_managers = {extension: manager() for extension in sorted(set(extensions))}

    def capture(self) -> None:
        """Capture the first pass and the growth of the trees."""
        super().capture()
        assert self.level_cudagraph_manager is not None
        graphs = [(self.level_cudagraph_manager, self._grow)]
        graphs += [(m, functools.partial(self._extend, extension)) for extension, m in self.extension_managers.items()]
        for manager, grow in graphs:
            # vLLM hands over rows, slots and a mode, too: a level has as many rows for every request, and no slots.
            manager.capture(
                lambda num_reqs, _, metadata, __, across_dp, ___, grow=grow: grow(num_reqs, metadata, across_dp),
                progress_bar_desc="Capturing draft tree CUDA graphs",
            )

    @property
    def grows_on(self) -> bool:
        """Whether the host decides, after the ordinary levels, how a batch goes on."""
        return self.sizer is not None and self.max_depth > self.drafts.depth

    # -- the round --------------------------------------------------------------------------------------------

    def sample_draft(
        self,
        hidden_states: torch.Tensor,
        sample_src_positions: torch.Tensor,
        idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        """The root's candidates, kept for :meth:`_grow`; returns the first of them (arguments are vLLM's)."""
        num_reqs = hidden_states.shape[0]
        keys = self.coupling(idx_mapping, sample_src_positions, temperature, seeds)
        log_probs, tokens = self.head.candidates(hidden_states, keys, self.builder.top_k)
        self.root_log_probs[:num_reqs], self.root_tokens[:num_reqs] = log_probs, tokens
        return tokens[:, 0]

    def propose_step(self, step: StepInputs) -> Candidates:
        """The first pass, then all levels."""
        self._take_in(step)
        sizing = self._grow_batch(step, run.num_requests(step))
        return Candidates(tree=first_rows(self.tree, step.batch.num_reqs), sizing=sizing)

    @abstractmethod
    def _take_in(self, step: StepInputs) -> None:
        """The first pass: the root's candidates, and the position of each request's newest token in the buffers."""

    def _grow_batch(self, step: StepInputs, num_reqs: int) -> Sizing | None:
        """Grow the batch's trees, by captured graphs where there are some for its size; what sized them."""
        rows, options = self.level_rows, step.options
        how = run.dispatch(self, self.level_cudagraph_manager, num_reqs, rows, options)
        metadata = None
        if not how.in_graph:
            self._prepare_growth()
            if not options.get("skip_attn_for_dummy_run", False):
                metadata = self._level_metadata(how.desc, num_reqs, step.batch.seq_lens_cpu_upper_bound)
        arguments = (num_reqs, metadata, how.tokens_across_dp)
        if how.in_graph:
            assert self.level_cudagraph_manager is not None
            run.map_block_tables(self)
            self.level_cudagraph_manager.run_fullgraph(how.desc)
        else:
            self._grow(*arguments, depth=self._depth_of(step))
        if self.sizer is None:
            return None
        sizing = self.sizer.sizing(self._bins(num_reqs, options), self.builder.limits)
        if self.grows_on:
            extension = int(sizing.extensions.max())
            if how.in_graph:
                self.extension_managers[extension].run_fullgraph(how.desc)
            else:
                self._extend(extension, *arguments)
        return sizing

    def _depth_of(self, step: StepInputs) -> int:
        """Levels to grow: of as many nodes as the next step verifies, the best are no deeper than that."""
        if not step.num_scheduled or self.sizer is not None:  # 0: for the record, not to be verified
            return self.drafts.depth
        return max(1, min(self.drafts.depth, verified_nodes(step.num_scheduled, self.contemplates)))

    def _prepare_growth(self) -> None:
        """Lengths and query rows of the levels, from what the first pass left in the speculator's own buffers."""
        buffers = self.input_buffers
        prepare_growth(
            positions=buffers.positions,
            seq_lens=buffers.seq_lens,
            query_start_loc=buffers.query_start_loc,
            top_k=self.level_rows,
        )

    def _plan_growth(self, num_reqs: int, attn_metadata: dict[str, Any] | None) -> None:
        """The same and the attention's work plan, captured ahead of the first of a round's graphs of levels."""
        self._prepare_growth()
        if attn_metadata is not None:
            self._update_draft_decode_metadata(attn_metadata, num_reqs)

    def _bins(self, num_reqs: int, options: dict[str, Any]) -> npt.NDArray[np.int64]:
        """The batch's bins, int64 [R]; dummy batches are in the surest one, whose trees cost most."""
        assert self.sizer is not None
        if options.get("dummy_run") or self.sizer.policy.is_flat:
            return np.zeros(num_reqs, dtype=np.int64)
        return self.sizer.fetch(num_reqs)

    def _level_metadata(
        self, desc: BatchExecutionDescriptor, num_reqs: int, seq_lens_upper_bound: torch.Tensor
    ) -> dict[str, Any] | None:
        """vLLM's metadata of k query rows a request over the paged cache, the same for all levels."""
        rows = self.level_rows
        return self._build_attn_metadata(
            num_reqs=num_reqs,
            batch_desc=desc,
            query_start_loc_np=self.arange_np[: num_reqs + 1] * rows,
            seq_lens_cpu_upper_bound=seq_lens_upper_bound,
            step=self.tokens_ahead,
            causal=False,
            slot_mappings=self.no_slots[:, : (desc.num_reqs or num_reqs) * rows],
        )

    def _grow(
        self,
        num_reqs: int,
        attn_metadata: dict[str, Any] | None,
        num_tokens_across_dp: torch.Tensor | None,
        depth: int | None = None,
    ) -> None:
        """All ordinary levels, or ``depth``, from the root's candidates on; no sync, so that a graph can hold it.

        The trees are finished, or, where more levels may follow, assessed.
        """
        tree = self.builder
        beam = tree.start(self.root_log_probs[:num_reqs], self.root_tokens[:num_reqs])
        levels = range(1, depth or self.drafts.depth)
        roots = self.hidden_states[:num_reqs, : self.state_size]
        states = self._expand(levels, beam, roots, attn_metadata, num_tokens_across_dp)
        if self.sizer is not None:
            self.sizer.assess(tree.grown(), tree.limits, tree.caps)
        if self.grows_on:
            self.last_states[: states.shape[0]].copy_(states)
        else:
            tree.finish(self.tree)

    def _extend(
        self,
        extension: int,
        num_reqs: int,
        attn_metadata: dict[str, Any] | None,
        num_tokens_across_dp: torch.Tensor | None,
    ) -> None:
        """So many levels beyond the ordinary ones, each request's own share of them, then the finished trees."""
        depth = self.drafts.depth
        beam = self.builder.resume(num_reqs, depth)
        rows = num_reqs * (self.builder.top_k if depth > 1 else 1)
        levels = range(depth, depth + extension)
        self._expand(levels, beam, self.last_states[:rows], attn_metadata, num_tokens_across_dp)
        self.builder.finish(self.tree)

    def _expand(
        self,
        levels: range,
        beam: Beam,
        states: torch.Tensor,
        attn_metadata: dict[str, Any] | None,
        num_tokens_across_dp: torch.Tensor | None,
    ) -> torch.Tensor:
        """One forward of the drafter for each of ``levels``, whose nodes' children are the next level.

        Args:
            levels: numbers of the levels that are forwarded, from 1.
            beam: the first of them.
            states: [R, H] of the roots or [R * k, H] of the level before, as the drafter's next pass reads them; H is 0
                for a model that reads tokens alone.
            attn_metadata, num_tokens_across_dp: vLLM's.

        Returns:
            The states of the last level, [R * k, H].
        """
        top_k, tree, num_reqs = self.builder.top_k, self.builder, beam.tokens.shape[0]
        for level in levels:
            out, states, positions = self._forward_beam(level, beam, states, attn_metadata, num_tokens_across_dp)
            if self.token_offset:
                positions = positions + self.token_offset
            keys = self.coupling(self.idx_mapping[:num_reqs], positions, self.temperature, self.seeds)
            log_probs, tokens = self.head.candidates(out, keys, top_k)
            shape = (num_reqs, top_k, top_k)
            beam = tree.expand(level + 1, log_probs.view(shape), tokens.view(shape))
        return states

    def _forward_beam(
        self,
        level: int,
        beam: Beam,
        states: torch.Tensor,
        attn_metadata: dict[str, Any] | None,
        num_tokens_across_dp: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The drafter over one level's nodes; arguments as of :meth:`_expand`.

        Returns:
            For the R * k nodes: states for the head and for the next level, [rows, H] each, and positions.
        """
        num_reqs = beam.tokens.shape[0]
        rows = num_reqs * self.level_rows
        states = self._prepare_beam(level, beam, states)[:rows]
        self._attach_tails(attn_metadata, level, num_reqs, beam.masks)
        token_ids = self.level_ids[:rows]
        token_ids.view(num_reqs, self.level_rows).copy_(beam.tokens)
        out, states = self._forward_level(token_ids, states, attn_metadata, num_tokens_across_dp)
        return out, states, self.level_positions[:rows]

    @abstractmethod
    def _prepare_beam(self, level: int, beam: Beam, states: torch.Tensor) -> torch.Tensor:
        """States [at least rows, H] and positions of one level's nodes, from the ``states`` of the level before."""

    @abstractmethod
    def _forward_level(
        self,
        token_ids: torch.Tensor,
        level_states: torch.Tensor,
        attn_metadata: dict[str, Any] | None,
        num_tokens_across_dp: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The drafter over one level's rows: its states for the head and for the next level, [rows, H] each."""

    def _level_context(
        self, num_rows: int, attn_metadata: dict[str, Any] | None, num_tokens_across_dp: torch.Tensor | None
    ) -> AbstractContextManager[None]:
        """What the drafter's layers look up in a level's pass: no cache slots, for they write to their scratch.

        A layer that has none does not launch vLLM's kernel that writes to the cache.
        """
        self._prepare_eplb_forward(num_rows)
        return run.forward_context(self, num_rows, attn_metadata, None, num_tokens_across_dp)

    def _attach_tails(
        self, attn_metadata: dict[str, Any] | None, level: int, num_reqs: int, masks: torch.Tensor
    ) -> None:
        """Tell each layer where its tree's keys and values are, and by ``masks`` [R, rows, W] who sees which."""
        if attn_metadata is None:
            return
        for name, scratch in self.scratches.items():
            tail = DraftTail(
                scratch=scratch,
                row_mask=masks.reshape(-1, masks.shape[-1]),
                length=self.tail_lengths[level - 1 : level],
                num_reqs=num_reqs,
                queries_per_req=self.level_rows,
                has_shared=self.shared_rows > 0,
            )
            # Layers of one cache group share their metadata, but each has a scratch of its own.
            attn_metadata[name] = dataclasses.replace(attn_metadata[name], draft_tail=tail)
