"""Drafters without weights, which copy earlier continuations of the last tokens (prompt lookup, SuffixDecoding)."""

import numpy as np
import torch
import triton
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_crossspec.arrays import Array
from vllm_crossspec.config.schema import CrossSpecConfig
from vllm_crossspec.drafters.lookup.corpus import Corpus
from vllm_crossspec.drafters.lookup.kernels import Matches, corpus_matches, own_matches
from vllm_crossspec.drafters.lookup.trees import BEYOND, MAX_CANDIDATES, match_tree
from vllm_crossspec.drafting.proposer import empty_tree, first_rows
from vllm_crossspec.drafting.stateless import CachelessProposer
from vllm_crossspec.ngram_store.contexts import texts_of
from vllm_crossspec.types import Candidates, StepInputs


class LookupProposer(CachelessProposer):
    """Drafts continuations of earlier occurrences of a request's last tokens.

    It searches the request's own text and, if the operator allows it, earlier requests' outputs (``corpus``). A chain
    is the continuation of the longest match, the latest one in the own text. A tree merges several continuations
    (``trees``). Each search takes one launch, and so do the trees; none waits.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, name: str, settings: CrossSpecConfig):
        super().__init__(vllm_config, device, name, settings)
        lookup = self.drafter.lookup
        assert lookup is not None and lookup.min_match is not None and lookup.max_match is not None
        self.min_match, self.max_match = lookup.min_match, lookup.max_match
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.corpus: Corpus | None = None
        if lookup.share:
            self.corpus = Corpus(lookup.cache_tokens, triton.next_power_of_2(self.max_match), device)
        num_sources = 2 if self.corpus is not None else 1
        most = MAX_CANDIDATES // triton.next_power_of_2(self.drafter.depth) // num_sources
        self.num_matches = 1 if self.drafter.tree.is_chain else max(min(lookup.num_matches or 1, most), 1)
        num_rows = self.num_matches * num_sources

        lengths = torch.zeros(max_num_reqs, num_rows, dtype=torch.int32, device=device)
        continuations = torch.zeros(*lengths.shape, self.drafter.depth, dtype=torch.int32, device=device)
        self.matches = Matches(continuations, lengths, torch.zeros_like(lengths, dtype=torch.float32))
        self.depths = torch.arange(1, self.drafter.depth + 1, device=device)
        self.tokens = torch.zeros(max_num_reqs, self.drafter.depth, dtype=torch.int64, device=device)
        self.tree = None if self.drafter.tree.is_chain else empty_tree(max_num_reqs, settings.num_nodes, device)

    @torch.inference_mode()
    def propose_step(self, step: StepInputs) -> Candidates:
        """Search, and draft the matches; a request without a match gets a draft that will be rejected."""
        found = self._search(step)
        if self.tree is not None:
            self._build(found)
            return Candidates(tree=first_rows(self.tree, step.batch.num_reqs))
        chosen = found.continuations[:, 0]
        if self.corpus is not None:  # use earlier outputs if their match is longer
            is_longer = found.lengths[:, self.num_matches] > found.lengths[:, 0]
            chosen = torch.where(is_longer[:, None], found.continuations[:, self.num_matches], chosen)
        return Candidates(tokens=self.tokens[: step.batch.num_reqs].copy_(chosen.clamp(min=0)))

    @torch.inference_mode()
    def forecast(self, step: StepInputs) -> torch.Tensor:
        """The sum of the nodes' probabilities; for a chain that of its longest match."""
        found = self._search(step)
        if self.tree is not None:
            self._build(found)
            return self.tree.log_probs[: step.batch.num_reqs].exp().sum(dim=1)
        longest = found.lengths.amax(dim=1, keepdim=True).float()
        agreed = torch.where(longest < self.max_match, longest, BEYOND * self.max_match)
        return (agreed / (agreed + self.depths)).sum(dim=1)

    def _search(self, step: StepInputs) -> Matches:
        """Matches of the batch's requests."""
        texts, num_matches = texts_of(step.batch, self.req_states), self.num_matches
        found = Matches(*(part[: step.batch.num_reqs] for part in self.matches))
        own_matches(texts, max_match=self.max_match, min_match=self.min_match, num_matches=num_matches, out=found)
        if self.corpus is None:
            return found
        version = self.corpus.version
        if version is None:
            found.lengths[:, num_matches:] = 0
            return found
        lengths = {"max_match": self.corpus.context, "min_match": self.min_match}
        corpus = version.for_kernels()
        corpus_matches(texts, corpus, **lengths, first_match=num_matches, num_matches=num_matches, out=found)
        return found

    def _build(self, found: Matches) -> None:
        assert self.tree is not None and self.drafter.tree.num_nodes is not None
        match_tree(found, max_match=self.max_match, num_nodes=self.drafter.tree.num_nodes, out=self.tree)

    def requests_leave(self, slots: list[int]) -> None:
        """Add the requests' outputs to the corpus: copied to the host asynchronously, read by its thread."""
        if self.corpus is None:
            return
        prompts = self.req_states.prompt_len.np[slots]
        all_tokens = self.req_states.all_token_ids.gpu
        known = min(int(self.req_states.num_computed_tokens_np[slots].max()) + 1, all_tokens.shape[1])
        rows = async_tensor_h2d(np.array(slots, dtype=np.int64), device=self.device)
        tokens = _to_host(all_tokens[:, :known].index_select(0, rows))
        computed = _to_host(self.req_states.num_computed_tokens.gpu.index_select(0, rows))
        event = torch.Event(self.device) if self.device.type != "cpu" else None
        if event is not None:
            event.record()

        def read() -> list[Array]:
            if event is not None:
                event.synchronize()
            ends = computed.numpy() + 1
            return [row[start:end] for row, start, end in zip(tokens.numpy(), prompts, ends, strict=True)]

        self.corpus.add(read)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """An asynchronous copy on the host."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
