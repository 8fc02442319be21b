"""Trees from the marginals of a parallel drafter: one forward gives the likeliest tokens of every position."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig

from vllm_crossspec.engine.draft_settings import DraftSettings
from vllm_crossspec.engine.heads import NoiseKeys
from vllm_crossspec.engine.proposers.base import Proposer, empty_tree, first_rows
from vllm_crossspec.ngram.contexts import last_tokens
from vllm_crossspec.ngram.store import MappedFile, NgramStore, open_store, place
from vllm_crossspec.tree.base import tree_kind
from vllm_crossspec.tree.continuity import Scoring, product_scoring
from vllm_crossspec.types import Candidates, StepInputs

GIB = 1 << 30


class MarginalTrees:
    """Builds the trees of one drafter, by the kind that its settings name; everything but the context is in a graph.

    Args:
        drafts: what the engine wants; its ``tree`` is no chain.
        vllm_config: of the engine.
        device: of the drafter.
    """

    def __init__(self, drafts: DraftSettings, vllm_config: VllmConfig, device: torch.device):
        assert drafts.tree is not None and drafts.top_k is not None and drafts.tree_nodes is not None
        self.drafts, self.num_nodes = drafts, drafts.tree_nodes
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.tree = empty_tree(max_num_reqs, drafts.num_nodes, device)
        self.store, self.file = _placed_store(drafts, device)
        width = self.store.order - 1 if self.store is not None else 1
        self.contexts = torch.full((max_num_reqs, width), -1, dtype=torch.int64, device=device)
        self._build = tree_kind(drafts.tree.type, "tree.type").load_builder(has_ngrams=self.store is not None)
        self.sizes = {
            "num_nodes": drafts.tree_nodes,
            "depth": drafts.depth,
            "top_k": drafts.top_k,
            "beam_width": drafts.tree.beam_width or drafts.tree_nodes,
            "max_num_reqs": max_num_reqs,
            "device": device,
            "scoring": _scoring(drafts),
            "store": self.store,
            "stop_tokens": _stop_tokens(vllm_config),
            "backoff": drafts.ngram.backoff if drafts.ngram is not None else None,
        }
        # A search by a beam keeps buffers. A function needs none: it takes the best prefixes one after another.
        self.builder = self._build(**self.sizes) if isinstance(self._build, type) else None

    def read_contexts(self, step: StepInputs, req_states: Any) -> None:
        """What n-grams go on from: the last known tokens of the batch; one launch before the drafter's forward.

        Raises:
            LostFileError: the store's file was cut short, and is read where it is.
        """
        if self.store is None or step.options.get("dummy_run"):
            return
        if self.file is not None:
            self.file.check()
        num_reqs = step.batch.num_reqs
        last_tokens(
            idx_mapping=step.batch.idx_mapping[:num_reqs],
            num_computed=req_states.num_computed_tokens.gpu,
            all_token_ids=req_states.all_token_ids.gpu,
            contexts=self.contexts[:num_reqs],
        )

    def build(self, log_probs: torch.Tensor, tokens: torch.Tensor, num_reqs: int) -> None:
        """Trees of the first ``num_reqs`` requests, from the candidates [num_reqs * K, k] of their positions."""
        shape = (num_reqs, self.drafts.depth, tokens.shape[1])
        log_probs, tokens = log_probs.view(shape), tokens.view(shape)
        if self.builder is None:
            self._build(log_probs=log_probs, tokens=tokens, num_nodes=self.num_nodes, out=self.tree)
            return
        contexts = self.contexts[:num_reqs] if self.store is not None else None
        self.builder.build(log_probs=log_probs, tokens=tokens, contexts=contexts, out=self.tree)


class MarginalTreeProposer(Proposer):
    """What makes a proposer of blocks one of trees: stands before it among the bases and builds in its graph.

    The proposer's own ``run_block`` takes the arguments of vLLM's ``_generate_draft``; it gives the final states
    [num_reqs * K, H] of all positions, and the keys of their noise.
    """

    run_block: Callable[..., tuple[torch.Tensor, NoiseKeys | None]]

    def __init__(self, vllm_config: VllmConfig, device: torch.device, name: str, drafts: DraftSettings):
        super().__init__(vllm_config, device, name, drafts)  # type: ignore[call-arg]
        self.trees = MarginalTrees(drafts, vllm_config, device)

    def _generate_draft(self, num_reqs: int, *arguments: Any, **options: Any) -> None:
        """The forward of the blocks, then trees in the place of first choices."""
        states, keys = self.run_block(num_reqs, *arguments, **options)
        assert self.drafts.top_k is not None
        self.trees.build(*self.head.candidates(states, keys, self.drafts.top_k), num_reqs)

    def propose_step(self, step: StepInputs) -> Candidates:
        """Draft a tree for every request; forward and builder are one CUDA graph."""
        self.trees.read_contexts(step, self.req_states)
        super().propose_step(step)  # type: ignore[safe-super]
        return Candidates(tree=first_rows(self.trees.tree, step.batch.num_reqs))


def _scoring(drafts: DraftSettings) -> Scoring:
    """How scores grow: as the settings say, and without any decay for a plain product of marginals."""
    tree = drafts.tree
    assert tree is not None
    ngram_weight = (tree.ngram_weight or 0.0) if drafts.ngram is not None else 0.0
    if tree.logit_decay is None or tree.level_decay is None:
        return product_scoring(ngram_weight)
    return Scoring(ngram_weight, tree.logit_decay, tree.level_decay)


def _placed_store(drafts: DraftSettings, device: torch.device) -> tuple[NgramStore | None, MappedFile | None]:
    """The store, and its file where that is what is read; a GPU has a copy."""
    ngram, key = drafts.ngram, "speculative_config.ngram"
    if ngram is None:
        return None, None
    path = Path(ngram.model).expanduser()
    store = open_store(path, key=f"{key}.model", order=ngram.order)
    if device.type == "cpu":
        return store, MappedFile(path, f"{key}.model")
    return place(store, ngram.placement, device, int(ngram.budget_gib * GIB), key=f"{key}.placement"), None


def _stop_tokens(vllm_config: VllmConfig) -> tuple[int, ...]:
    """The ids that end a text, after which no draft needs to go on."""
    ends = getattr(vllm_config.model_config.hf_text_config, "eos_token_id", None)
    return tuple(ends) if isinstance(ends, list | tuple) else () if ends is None else (int(ends),)
