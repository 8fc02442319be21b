"""Trees of an autoregressive drafter: one forward per level over the nodes of all requests."""

import dataclasses
import functools
from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from vllm_crossspec.config.schema import CrossSpecConfig, DrafterConfig
from vllm_crossspec.drafting.levels import prepare_growth
from vllm_crossspec.drafting.proposer import HeadSampling, Proposer, empty_tree, first_rows
from vllm_crossspec.graphs.rows import RowGraphManager
from vllm_crossspec.heterospec.sizer import TreeSizer
from vllm_crossspec.kinds.contemplate_layout import verified_nodes
from vllm_crossspec.kinds.tree import tree_kind
from vllm_crossspec.trees.attention.base import DraftTail, dtype_beside_cache
from vllm_crossspec.trees.builders.dynamic import Beam
from vllm_crossspec.types import Candidates, Sizing, StepInputs
from vllm_crossspec.vllm_api import run

NARROW = {4: (3, 3), 12: (5, 5)}
"""Levels, and nodes of each, that are grown where a request's step verifies at most so many nodes."""
NARROW_SHARED = {8: (3, 3), 20: (5, 5)}
"""The same where these are the most that a request may get of its batch's rows (``budget``), and most get fewer."""


@dataclasses.dataclass
class Growth:
    """A size of trees that can be grown.

    Attributes:
        nodes: most nodes of a request that are verified of such trees.
        depth: levels, without those of extensions.
        builder: of the trees, for as many levels and nodes of each.
        graphs: all levels, by batch size; None before vLLM asks for graphs.
    """

    nodes: int
    depth: int
    builder: Any
    graphs: RowGraphManager | None = None


class LevelPass(NamedTuple):
    """Context of a pass over a level for vLLM's layers.

    Attributes:
        attn_metadata: by layer name; None without attention.
        tokens_across_dp: int32 [ranks] rows of every data-parallel rank; None with one rank.
    """

    attn_metadata: dict[str, Any] | None
    tokens_across_dp: torch.Tensor | None


class LevelTrees(HeadSampling):
    """Expands the likeliest nodes level by level and keeps the best (EAGLE-2, section 4; EAGLE-3, section 3).

    Differences from the proposer of chains before which it is mixed in:

    - The first pass takes the accepted tokens into the paged cache and gives the root's candidates.
    - Each further level is one forward over k rows per request. They see the paged cache and their ancestors, which are
      in a scratch of every layer. So a tree needs no slots in the paged cache.
    - All levels are one CUDA graph. Trees sized by request have a second one for the extension levels, because the host
      learns the bins after the ordinary levels.
    - Where few nodes are verified, fewer and smaller levels are grown, by graphs of their own (:data:`NARROW`).
    """

    drafts_over_trees = True
    shared_rows = 0
    """Rows of a request besides a level's nodes, which all nodes see."""
    token_offset = 0
    """Offset from a row's position to the position of the token that it reads."""
    tokens_ahead = 0
    """Tokens of a request that the drafter's cache has after the first pass and the target's does not."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, name: str, settings: CrossSpecConfig):
        super().__init__(vllm_config, device, name, settings)
        drafter, tree, max_num_reqs = self.drafter, self.drafter.tree, self.max_num_reqs
        policy, self.max_depth = drafter.policy, drafter.max_depth
        assert tree.top_k is not None and tree.num_nodes is not None
        self.tree = empty_tree(max_num_reqs, settings.num_nodes, device)
        self.sizer = None if policy is None else TreeSizer(policy, drafter.depth, max_num_reqs, device)
        build = functools.partial(
            tree_kind(tree.type, "tree.type").load_builder(),
            num_nodes=tree.num_nodes,
            max_num_reqs=max_num_reqs,
            device=device,
            first_row=self.shared_rows,
            **tree.options(has_ngrams=False),
        )
        whole = build(depth=self.max_depth, top_k=tree.top_k)
        self.growths = [Growth(tree.num_nodes, drafter.depth, whole)]
        is_whole = tree.by_batch_size is None or policy is not None  # HeteroSpec's bins are of whole trees
        narrow = NARROW_SHARED if tree.budget == "batch" else NARROW
        for nodes, (levels, beam) in () if is_whole else reversed(narrow.items()):
            depth, top_k = min(levels, drafter.depth), min(beam, tree.top_k)
            # Beside contemplate rows a level keeps its rows, as they lie in the buffers, and there are fewer levels.
            builder = whole if self.contemplates else build(depth=depth, top_k=top_k)
            if nodes < tree.num_nodes:
                self.growths.insert(0, Growth(nodes, depth, builder))
        self.growth, top_k = self.growths[-1], tree.top_k
        max_rows = max_num_reqs * self.level_rows
        self.root_log_probs = torch.zeros(max_num_reqs, top_k, dtype=torch.float32, device=device)
        self.root_tokens = torch.zeros(max_num_reqs, top_k, dtype=torch.int64, device=device)
        self.level_positions = torch.zeros(max_rows, dtype=torch.int64, device=device)
        # The first pass's type, because a compiled model assumes the types that it was traced with.
        self.level_ids = torch.zeros(max_rows, dtype=self.input_buffers.input_ids.dtype, device=device)
        # Entry i is i: how many rows of the scratch are filled.
        most_rows = self.shared_rows + self.max_depth * top_k
        self.tail_lengths = torch.arange(most_rows + 1, dtype=torch.int32, device=device)
        # The states of the last ordinary level, for the extension levels in another graph.
        kept_rows = max_num_reqs * top_k if self.max_depth > drafter.depth else 0
        self.last_states = torch.zeros(kept_rows, self.state_size, dtype=self.dtype, device=device)
        self.scratches: dict[str, torch.Tensor] = {}
        self.extension_managers: dict[int, RowGraphManager] = {}

    # -- loading ----------------------------------------------------------------------------------------------

    def load_model(self, target_model: nn.Module) -> None:
        super().load_model(target_model)
        self._make_scratches()  # before vLLM's memory profile

    def borrow(self, owner: Proposer, target_model: nn.Module) -> None:
        super().borrow(owner, target_model)
        self._make_scratches()

    def _make_scratches(self) -> None:
        """Allocate room for keys and values of all requests' trees in each layer."""
        layers = self.vllm_config.compilation_config.static_forward_context
        rows = self.shared_rows + (self.max_depth - 1) * self.builder.top_k
        for name in self.draft_attn_layer_names:
            layer = layers[name]
            shape = (self.max_num_reqs, max(rows, 1), 2, layer.num_kv_heads, layer.head_size)
            self.scratches[name] = torch.zeros(shape, dtype=dtype_beside_cache(layer), device=self.device)

    def set_attn(self, *arguments: Any, **options: Any) -> None:
        super().set_attn(*arguments, **options)
        num_groups = len(self.kv_cache_config.kv_cache_groups)
        max_rows = self.level_positions.shape[0]
        self.no_slots = torch.full((num_groups, max_rows), PAD_SLOT_ID, dtype=torch.int64, device=self.device)

    @property
    def builder(self) -> Any:
        """Of the trees that are grown now."""
        return self.growth.builder

    @property
    def level_rows(self) -> int:
        """Rows of a request in each pass over a level."""
        return int(self.builder.top_k) + self.shared_rows

    @property
    def state_size(self) -> int:
        """H of the state that a node passes to its children besides keys and values."""
        return self.hidden_size

    @property
    def head_rows_per_req(self) -> int:
        return self.builder.top_k

    # -- CUDA graphs ------------------------------------------------------------------------------------------

    @staticmethod
    def native_steps(drafter: DrafterConfig) -> int:
        return 1  # vLLM's class runs only the first pass

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        # One graph per batch size for all levels, and one more for each extension.
        super().init_cudagraph_manager(cudagraph_mode)
        manager = functools.partial(RowGraphManager, self, cudagraph_mode, causal=False)
        for growth in self.growths:
            rows = growth.builder.top_k + self.shared_rows
            growth.graphs = manager(rows_per_req=rows, prepare=self._plan_growth)
        extensions = self.sizer.policy.extensions if self.sizer is not None and self.grows_on else ()
        self.extension_managers = {levels: manager(rows_per_req=self.level_rows) for levels in sorted(set(extensions))}

    def capture(self) -> None:
        super().capture()
        whole = self.growths[-1]
        graphs = [(growth, growth.graphs, self._grow) for growth in self.growths]
        graphs += [(whole, m, functools.partial(self._extend, levels)) for levels, m in self.extension_managers.items()]
        for growth, manager, grow in graphs:  # the whole one comes last, and stays
            assert manager is not None
            self.growth = growth
            # vLLM also passes rows, slots and a mode, which a level does not need.
            manager.capture(
                lambda num_reqs, _, *told, grow=grow: grow(num_reqs, LevelPass(told[0], told[2])),
                progress_bar_desc="Capturing draft tree CUDA graphs",
            )

    @property
    def grows_on(self) -> bool:
        """Whether the host chooses extension levels after the ordinary levels."""
        return self.sizer is not None and self.max_depth > self.drafter.depth

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
        """Keep a whole tree's first candidates for :meth:`_grow`; return the very first (arguments are vLLM's)."""
        num_reqs = hidden_states.shape[0]
        keys = self.coupling(idx_mapping, sample_src_positions, temperature, seeds)
        log_probs, tokens = self.head.candidates(hidden_states, keys, self.root_tokens.shape[1])
        self.root_log_probs[:num_reqs], self.root_tokens[:num_reqs] = log_probs, tokens
        return tokens[:, 0]

    def propose_step(self, step: StepInputs) -> Candidates:
        self._take_in(step)
        sizing = self._grow_batch(step, run.num_requests(step))
        return Candidates(tree=first_rows(self.tree, step.batch.num_reqs), sizing=sizing)

    @abstractmethod
    def _take_in(self, step: StepInputs) -> None:
        """Run the first pass: the root's candidates, and each request's newest position in the buffers."""

    def _grow_batch(self, step: StepInputs, num_reqs: int) -> Sizing | None:
        """Grow the batch's trees, by captured graphs if its size has some; return their sizing."""
        self.growth = self._growth_for(step)
        how = run.dispatch(self, self.growth.graphs, num_reqs, self.level_rows, step)
        metadata = None
        if not how.in_graph:
            self._prepare_growth()
            if not step.skips_attention:
                metadata = self._level_metadata(how.desc, num_reqs, step.batch.seq_lens_cpu_upper_bound)
        told = LevelPass(metadata, how.tokens_across_dp)
        if how.in_graph:
            assert self.growth.graphs is not None
            run.map_block_tables(self)
            self.growth.graphs.run_fullgraph(how.desc)
        else:
            self._grow(num_reqs, told)
        if self.sizer is None:
            return None
        sizing = self.sizer.sizing(self._bins(num_reqs, step.is_dummy), self.builder.limits)
        if self.grows_on:
            extension = int(sizing.extensions.max())
            if how.in_graph:
                self.extension_managers[extension].run_fullgraph(how.desc)
            else:
                self._extend(extension, num_reqs, told)
        return sizing

    def _growth_for(self, step: StepInputs) -> Growth:
        """The smallest trees that have the nodes which the next step verifies; data-parallel ranks grow alike."""
        tokens = step.num_scheduled
        if step.is_dummy:  # as many as it verifies itself
            tokens = int(step.batch.num_tokens) // max(int(step.batch.num_reqs), 1) - 1
        if not tokens or step.dp_sync is not None:  # 0: recorded, not verified
            return self.growths[-1]
        nodes = verified_nodes(tokens, self.contemplates)
        return next((growth for growth in self.growths if nodes <= growth.nodes), self.growths[-1])

    def _prepare_growth(self) -> None:
        """Compute lengths and query rows of the levels from the first pass's buffers."""
        own = self.input_buffers
        lengths = {"seq_lens": own.seq_lens, "query_start_loc": own.query_start_loc}
        prepare_growth(positions=own.positions, **lengths, top_k=self.level_rows)

    def _plan_growth(self, num_reqs: int, attn_metadata: dict[str, Any] | None) -> None:
        # Captured before the levels, together with the attention's work plan.
        self._prepare_growth()
        self._plan_attention(num_reqs, attn_metadata)

    def _bins(self, num_reqs: int, is_dummy: bool) -> npt.NDArray[np.int64]:
        """The batch's bins, int64 [R]; dummy batches use bin 0, the most certain, whose trees cost most."""
        assert self.sizer is not None
        if is_dummy or self.sizer.policy.is_flat:
            return np.zeros(num_reqs, dtype=np.int64)
        return self.sizer.fetch(num_reqs)

    def _level_metadata(
        self, desc: BatchExecutionDescriptor, num_reqs: int, seq_lens_upper_bound: torch.Tensor
    ) -> dict[str, Any] | None:
        """vLLM's metadata of k query rows per request over the paged cache, the same for all levels."""
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

    def _grow(self, num_reqs: int, told: LevelPass) -> None:
        """Grow all ordinary levels from the root's candidates; no sync, so a graph can hold it.

        Then the trees are finished, or assessed if extension levels can follow.
        """
        tree = self.builder
        beam = tree.start(self.root_log_probs[:num_reqs, : tree.top_k], self.root_tokens[:num_reqs, : tree.top_k])
        levels = range(1, self.growth.depth)
        roots = self.hidden_states[:num_reqs, : self.state_size]
        states = self._expand(levels, beam, roots, told)
        if self.sizer is not None:
            self.sizer.assess(tree.grown(), tree.limits, tree.caps)
        if self.grows_on:
            self.last_states[: states.shape[0]].copy_(states)
        else:
            tree.finish(self.tree)

    def _extend(self, extension: int, num_reqs: int, told: LevelPass) -> None:
        """Grow ``extension`` more levels, up to each request's limit, and finish the trees."""
        depth = self.drafter.depth
        beam = self.builder.resume(num_reqs, depth)
        rows = num_reqs * (self.builder.top_k if depth > 1 else 1)
        self._expand(range(depth, depth + extension), beam, self.last_states[:rows], told)
        self.builder.finish(self.tree)

    def _expand(self, levels: range, beam: Beam, states: torch.Tensor, told: LevelPass) -> torch.Tensor:
        """Run the drafter over each of ``levels``; the nodes' children are the next level.

        Args:
            levels: numbers of the levels, from 1.
            beam: the first of them.
            states: [R, H] of the roots or [R * k, H] of the level before; H is 0 for a model that reads only tokens.
            told: of every pass.

        Returns:
            The states of the last level, [R * k, H].
        """
        top_k, tree, num_reqs = self.builder.top_k, self.builder, beam.tokens.shape[0]
        for level in levels:
            out, states, positions = self._forward_beam(level, beam, states, told)
            if self.token_offset:
                positions = positions + self.token_offset
            keys = self.coupling(self.idx_mapping[:num_reqs], positions, self.temperature, self.seeds)
            log_probs, tokens = self.head.candidates(out, keys, top_k)
            shape = (num_reqs, top_k, top_k)
            beam = tree.expand(level + 1, log_probs.view(shape), tokens.view(shape))
        return states

    def _forward_beam(
        self, level: int, beam: Beam, states: torch.Tensor, told: LevelPass
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run the drafter over one level's nodes; arguments as in :meth:`_expand`.

        Returns:
            Of the R * k nodes: states for the head and for the next level, [rows, H] each, and positions.
        """
        num_reqs = beam.tokens.shape[0]
        rows = num_reqs * self.level_rows
        states = self._prepare_beam(level, beam, states)[:rows]
        self._attach_tails(told, level, num_reqs, beam.masks)
        token_ids = self.level_ids[:rows]
        token_ids.view(num_reqs, self.level_rows).copy_(beam.tokens)
        out, states = self._forward_level(token_ids, states, told)
        return out, states, self.level_positions[:rows]

    @abstractmethod
    def _prepare_beam(self, level: int, beam: Beam, states: torch.Tensor) -> torch.Tensor:
        """Write the positions of one level's nodes; return their states [at least rows, H] from the level before."""

    @abstractmethod
    def _forward_level(
        self, token_ids: torch.Tensor, level_states: torch.Tensor, told: LevelPass, embeds: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the drafter over one level's rows; return states for the head and the next level, [rows, H] each."""

    def _level_context(self, num_rows: int, told: LevelPass) -> AbstractContextManager[None]:
        """The forward context of a level's pass; without cache slots, because layers write to their scratch."""
        self._prepare_eplb_forward(num_rows)
        return run.forward_context(self, num_rows, told.attn_metadata, None, told.tokens_across_dp)

    def _attach_tails(self, told: LevelPass, level: int, num_reqs: int, masks: torch.Tensor) -> None:
        """Give each layer its scratch, and the ``masks`` [R, rows, W] of the level's rows."""
        metadata = told.attn_metadata
        if metadata is None:
            return
        length = self.shared_rows + level * self.builder.top_k
        for name, scratch in self.scratches.items():
            tail = DraftTail(
                scratch=scratch,
                row_mask=masks.reshape(-1, masks.shape[-1]),
                length=self.tail_lengths[length : length + 1],
                num_reqs=num_reqs,
                queries_per_req=self.level_rows,
                has_shared=self.shared_rows > 0,
            )
            # Layers of one cache group share their metadata, but each has a scratch of its own.
            metadata[name] = dataclasses.replace(metadata[name], draft_tail=tail)
