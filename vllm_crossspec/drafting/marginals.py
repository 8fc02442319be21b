"""Trees from a parallel drafter's marginals: one forward gives the likeliest tokens of every position."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig

from vllm_crossspec.config.schema import CrossSpecConfig, NgramConfig
from vllm_crossspec.drafting.noise import NoiseKeys
from vllm_crossspec.drafting.proposer import HeadSampling, empty_tree, first_rows
from vllm_crossspec.kinds.tree import tree_kind
from vllm_crossspec.ngram_store.contexts import last_tokens, texts_of
from vllm_crossspec.ngram_store.store import MappedFile, NgramStore, open_store, place
from vllm_crossspec.types import Candidates, StepInputs

GIB = 1 << 30


class MarginalTreeProposer(HeadSampling):
    """A mixin that makes trees of a block proposer's marginals.

    Differences from the block proposer:

    - Trees are built in the graph of the block's forward, instead of first choices. Only the n-grams' contexts are read
      before.
    - ``run_block`` takes the arguments of vLLM's ``_generate_draft``. It returns the final states [num_reqs * K, H] of
      all positions, and the keys of their noise.
    """

    run_block: Callable[..., tuple[torch.Tensor, NoiseKeys | None]]

    def __init__(self, vllm_config: VllmConfig, device: torch.device, name: str, settings: CrossSpecConfig):
        super().__init__(vllm_config, device, name, settings)
        drafter, max_num_reqs = self.drafter, vllm_config.scheduler_config.max_num_seqs
        self.tree = empty_tree(max_num_reqs, settings.num_nodes, device)
        self.store, self.file = _placed_store(drafter.ngram, device)
        has_ngrams = self.store is not None
        width = self.store.order - 1 if self.store is not None else 1
        self.contexts = torch.full((max_num_reqs, width), -1, dtype=torch.int64, device=device)
        self.build = tree_kind(drafter.tree.type, "tree.type").load_builder(has_ngrams=has_ngrams)
        self.builder: Any = None
        if not isinstance(self.build, type):  # a function without state
            return
        self.builder = self.build(
            num_nodes=drafter.tree.num_nodes,
            depth=drafter.depth,
            top_k=drafter.tree.top_k,
            max_num_reqs=max_num_reqs,
            device=device,
            store=self.store,
            stop_tokens=_stop_tokens(vllm_config),
            backoff=drafter.ngram.backoff if drafter.ngram is not None else None,
            **drafter.tree.options(has_ngrams=has_ngrams),
        )

    def _generate_draft(self, num_reqs: int, *arguments: Any, **options: Any) -> None:
        """Run the blocks' forward, and build trees of their candidates."""
        states, keys = self.run_block(num_reqs, *arguments, **options)
        assert self.drafter.tree.top_k is not None
        log_probs, tokens = self.head.candidates(states, keys, self.drafter.tree.top_k)
        shape = (num_reqs, self.drafter.depth, tokens.shape[1])
        given = {"log_probs": log_probs.view(shape), "tokens": tokens.view(shape), "out": self.tree}
        if self.builder is None:
            self.build(num_nodes=self.drafter.tree.num_nodes, **given)
        else:
            self.builder.build(contexts=self.contexts[:num_reqs] if self.store is not None else None, **given)

    def propose_step(self, step: StepInputs) -> Candidates:
        """Draft a tree for every request.

        Raises:
            LostFileError: the memory-mapped file of the store was truncated.
        """
        num_reqs = step.batch.num_reqs
        if self.store is not None and not step.is_dummy:
            if self.file is not None:
                self.file.check()
            last_tokens(texts_of(step.batch, self.req_states), self.contexts[:num_reqs])
        super().propose_step(step)  # type: ignore[safe-super]
        return Candidates(tree=first_rows(self.tree, num_reqs))


def _placed_store(ngram: NgramConfig | None, device: torch.device) -> tuple[NgramStore | None, MappedFile | None]:
    """The store, and its file if it is memory-mapped; a GPU has a copy."""
    if ngram is None:
        return None, None
    path, key = Path(ngram.model).expanduser(), "speculative_config.ngram"
    store = open_store(path, key=f"{key}.model", order=ngram.order)
    if device.type == "cpu":
        return store, MappedFile(path, f"{key}.model")
    return place(store, ngram.placement, device, int(ngram.budget_gib * GIB), key=f"{key}.placement"), None


def _stop_tokens(vllm_config: VllmConfig) -> tuple[int, ...]:
    """Ids that end a text, after which nothing is drafted."""
    ends = getattr(vllm_config.model_config.hf_text_config, "eos_token_id", None)
    return tuple(ends) if isinstance(ends, list | tuple) else () if ends is None else (int(ends),)
