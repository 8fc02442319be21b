"""Drafters without weights: what followed the last tokens where they stood before (prompt lookup, SuffixDecoding)."""

import numpy as np
import torch
import triton
from torch import nn
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_crossspec.arrays import Array
from vllm_crossspec.engine.draft_settings import DraftSettings
from vllm_crossspec.engine.proposers.base import empty_tree, first_rows
from vllm_crossspec.engine.proposers.stateless import CachelessProposer
from vllm_crossspec.lookup.corpus import Corpus
from vllm_crossspec.lookup.kernels import Matches, Texts, corpus_matches, own_matches
from vllm_crossspec.lookup.trees import BEYOND, MAX_CANDIDATES, match_tree
from vllm_crossspec.types import Candidates, StepInputs


class LookupProposer(CachelessProposer):
    """Drafts the continuations of earlier places of a request's last tokens: in its own text and, where the operator
    allows it, in the outputs of earlier requests.

    A chain is what followed the longest match, the latest one in the request's own text; a tree shares what several
    continuations have in common (``lookup.trees``). One launch searches a request's text, one the earlier outputs, one
    builds the trees; none of them waits.

    Attributes:
        corpus: earlier outputs; None where requests share nothing.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, name: str, drafts: DraftSettings):
        super().__init__(vllm_config, device, name, drafts)
        lookup = drafts.lookup
        assert lookup is not None and lookup.min_match is not None and lookup.max_match is not None
        self.min_match, self.max_match = lookup.min_match, lookup.max_match
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.corpus: Corpus | None = None
        if lookup.share:
            self.corpus = Corpus(lookup.cache_tokens, triton.next_power_of_2(self.max_match), device)
        num_sources = 2 if self.corpus is not None else 1
        most = MAX_CANDIDATES // triton.next_power_of_2(drafts.depth) // num_sources
        self.num_matches = 1 if drafts.is_chain else max(min(lookup.num_matches or 1, most), 1)
        num_rows = self.num_matches * num_sources

        def filled(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(max_num_reqs, num_rows, *shape, dtype=dtype, device=device)

        self.matches = Matches(
            filled(drafts.depth, dtype=torch.int32), filled(dtype=torch.int32), filled(dtype=torch.float32)
        )
        self.depths = torch.arange(1, drafts.depth + 1, device=device)
        self.tokens = torch.zeros(max_num_reqs, drafts.depth, dtype=torch.int64, device=device)
        self.tree = None if drafts.is_chain else empty_tree(max_num_reqs, drafts.num_nodes, device)

    def load_model(self, target_model: nn.Module) -> None:
        """There is nothing to load."""

    @torch.inference_mode()
    def propose_step(self, step: StepInputs) -> Candidates:
        """Search, and draft what was found; a request without a match gets a draft that is not accepted."""
        found = self._search(step)
        if self.tree is not None:
            self._build(found)
            return Candidates(tree=first_rows(self.tree, step.batch.num_reqs))
        chosen = found.continuations[:, 0]
        if self.corpus is not None:  # what earlier outputs say where the request's own text says less
            is_longer = found.lengths[:, self.num_matches] > found.lengths[:, 0]
            chosen = torch.where(is_longer[:, None], found.continuations[:, self.num_matches], chosen)
        return Candidates(tokens=self.tokens[: step.batch.num_reqs].copy_(chosen.clamp(min=0)))

    @torch.inference_mode()
    def forecast(self, step: StepInputs) -> torch.Tensor:
        """What was found, and how surely: the sum of the nodes' probabilities; a chain's by its longest match alone."""
        found = self._search(step)
        if self.tree is not None:
            self._build(found)
            return self.tree.log_probs[: step.batch.num_reqs].exp().sum(dim=1)
        longest = found.lengths.amax(dim=1, keepdim=True).float()
        agreed = torch.where(longest < self.max_match, longest, BEYOND * self.max_match)
        return (agreed / (agreed + self.depths)).sum(dim=1)

    def _search(self, step: StepInputs) -> Matches:
        """The matches of the batch's requests."""
        num_reqs, states, num_matches = step.batch.num_reqs, self.req_states, self.num_matches
        texts = Texts(step.batch.idx_mapping[:num_reqs], states.num_computed_tokens.gpu, states.all_token_ids.gpu)
        found = Matches(*(part[:num_reqs] for part in self.matches))
        own_matches(texts, max_match=self.max_match, min_match=self.min_match, num_matches=num_matches, out=found)
        if self.corpus is None:
            return found
        version = self.corpus.version
        if version is None:
            found.lengths[:, num_matches:] = 0
            return found
        corpus_matches(
            texts,
            version[1:],
            max_match=self.corpus.context,
            min_match=self.min_match,
            first_match=num_matches,
            num_matches=num_matches,
            out=found,
        )
        return found

    def _build(self, found: Matches) -> None:
        assert self.tree is not None and self.drafts.tree_nodes is not None
        match_tree(found, max_match=self.max_match, num_nodes=self.drafts.tree_nodes, out=self.tree)

    def requests_leave(self, slots: list[int]) -> None:
        """What they generated becomes part of the corpus: copied on the device, read by the corpus' own thread."""
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
    """A copy that is on its way."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
