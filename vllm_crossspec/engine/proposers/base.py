"""The interface that every drafter of this project fits."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig

from vllm_crossspec.drafters.requests import copy_requests
from vllm_crossspec.engine.draft_settings import DraftSettings
from vllm_crossspec.engine.heads import DraftHead, NoiseKeys, make_head
from vllm_crossspec.types import Candidates, StepInputs, TokenTree


class Proposer(ABC):
    """One drafter in the engine: its weights, its KV-cache layers, its target layers, its draft.

    The host builds every proposer with a shallow copy of the engine's config whose ``speculative_config`` is this
    drafter's own, loads it after the target, and calls it once a round: :meth:`propose_step` if the drafter was
    chosen, :meth:`catch_up` if not, so that its cache always holds the accepted tokens.

    Attributes:
        name: the user's name for the drafter; also the prefix of its layers, which keeps them apart from others'.
        num_speculative_steps: K, draft tokens a round.
        draft_attn_layer_names: names of its attention layers, after loading.
        attn_groups: its attention groups, after :meth:`set_attn`.
        draft_logits: [S, K, vocabulary] cache of probabilistic drafts, or None.
        head: from its last states to draft tokens, after loading.
        drafts: what the engine wants of the drafts.
        drafts_over_trees: whether its own forward passes attend over trees.
        contemplates: whether the target runs contemplate rows for it.
        engine_config: the engine's own config, whose draft length is the engine's.
        req_states: the runner's request states.
    """

    name: str
    drafts: DraftSettings
    drafts_over_trees: bool = False
    contemplates: bool = False
    engine_config: VllmConfig
    vllm_config: VllmConfig
    req_states: Any
    model: nn.Module
    speculative_config: Any
    num_speculative_steps: int
    num_query_per_req: int
    num_extra_query_per_req: int
    draft_attn_layer_names: set[str]
    attn_groups: list[Any]
    draft_logits: torch.Tensor | None
    head: DraftHead
    use_acceptance_estimator: bool
    use_local_argmax_reduction: bool
    use_fp64_gumbel: bool
    max_num_reqs: int
    hidden_size: int
    dtype: torch.dtype
    supports_mm_inputs: bool
    pcp_manager: Any
    # vLLM's own protocol for speculators, which its base class provides.
    load_model: Callable[[nn.Module], None]
    load_draft_model: Callable[..., nn.Module]
    set_attn: Callable[..., None]
    set_eplb_state: Callable[[Any], None]
    init_cudagraph_manager: Callable[[Any], None]
    capture: Callable[[], None]

    @staticmethod
    def native_steps(drafts: DraftSettings) -> int:
        """Draft tokens that vLLM's own class, from which the proposer descends, is to draft."""
        return drafts.depth

    def borrow(self, owner: "Proposer", target_model: nn.Module) -> None:
        """Use another proposer's model and cache in the place of loading; buffers and graphs are one's own.

        Args:
            owner: of the same kind, loaded.
            target_model: the target.
        """
        # vLLM's loading takes what this gives for what it has read.
        self.load_draft_model = lambda *_: owner.model
        self.load_model(target_model)
        self.draft_attn_layer_names = owner.draft_attn_layer_names

    @abstractmethod
    def propose_step(self, step: StepInputs) -> Candidates:
        """Take the step's accepted tokens into the drafter's cache and draft the next tokens."""

    @abstractmethod
    def catch_up(self, step: StepInputs) -> None:
        """Take the step's accepted tokens into the drafter's cache; draft nothing."""

    def requests_leave(self, slots: list[int]) -> None:  # noqa: B027
        """The requests of these slots leave them: ended, aborted or preempted."""

    # -- the output layer -------------------------------------------------------------------------------------

    @property
    def head_rows_per_req(self) -> int:
        """Most rows of a request in one call of the head."""
        return 1

    def load_head(self) -> None:
        """Make the head of the loaded model, as the settings ask."""
        config = self.engine_config
        self.head = make_head(
            self.model,
            self.drafts,
            max_rows=self.max_num_reqs * self.head_rows_per_req,
            folder=self.speculative_config.draft_model_config.model,
            vocab_size=config.model_config.get_vocab_size(),
            has_weights=config.load_config.load_format != "dummy",
        )

    def coupling(
        self, idx_mapping: torch.Tensor, positions: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor
    ) -> NoiseKeys | None:
        """The keys of the target's noise for rows that are being drafted; None for drafts that do not look at it.

        Args:
            idx_mapping: int [rows / n] slot of every n consecutive rows; negative entries are padding.
            positions: int64 [rows] position of the token before the drafted one.
            temperature, seeds: [S] of every slot.
        """
        if not self.drafts.is_coupled:
            return None
        return NoiseKeys(idx_mapping, positions, temperature, seeds, self.use_fp64_gumbel, self.drafts.sharpness)

    def samples_natively(self, draft_logits: torch.Tensor | None) -> bool:
        """Whether vLLM's own sampling of drafts serves: it keeps logits, or takes the arg-max shard by shard."""
        is_local = self.use_local_argmax_reduction and not self.drafts.is_coupled and self.drafts.head is None
        return draft_logits is not None or self.use_acceptance_estimator or is_local

    # -- for rounds in which others draft, or nobody: what it misses is kept, and caught up with later --------

    def fuse(self, tapped_states: torch.Tensor) -> torch.Tensor:
        """The drafter's own features [n, F] of the target states that it taps, [n, taps * H]."""
        return self.model.combine_hidden_states(tapped_states)

    @abstractmethod
    def write_context(
        self, features: torch.Tensor, next_tokens: torch.Tensor, positions: torch.Tensor, kv_slots: list[torch.Tensor]
    ) -> None:
        """Take accepted tokens into the cache: keys and values of them, and nothing else.

        Args:
            features: [n, F] of :meth:`fuse`.
            next_tokens: int64 [n] id of the token after each.
            positions: int64 [n].
            kv_slots: int64 [n] cache slot of each token, for every cache group of the drafter.
        """

    def start_rows(self, step: StepInputs) -> StepInputs:
        """Complete the inputs of a round that starts from one row a request; block tables are the batch's already."""
        return step

    def forecast(self, step: StepInputs) -> torch.Tensor | None:
        """float32 [R] draft tokens of each request that are expected to be accepted, known before anything is drafted.

        None where nothing is: what most drafters will draft is not known earlier.
        """
        return None

    @property
    def writes_context(self) -> bool:
        """Whether it offers :meth:`write_context`."""
        return True

    @property
    def kv_groups(self) -> list[int]:
        """The cache groups of its layers."""
        return [group for group, members in enumerate(self.attn_groups) if members]


class HeadSampling:
    """A proposer's own output layer in the place of vLLM's; stands before vLLM's speculator among the bases."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, name: str, drafts: DraftSettings):
        self.name, self.drafts = name, drafts  # vLLM's initialiser may ask for sizes that follow from them
        super().__init__(vllm_config, device)  # type: ignore[call-arg]

    def load_model(self, target_model: nn.Module) -> None:
        """The model, then its output layer."""
        super().load_model(target_model)  # type: ignore[misc]
        self.load_head()  # type: ignore[attr-defined]

    def sample_draft(
        self,
        hidden_states: torch.Tensor,
        sample_src_positions: torch.Tensor,
        idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        draft_step: torch.Tensor,
        draft_logits: torch.Tensor | None,
        spec_step_idx: int = 0,
        **others: Any,
    ) -> torch.Tensor:
        """First choices, coupled with the target's noise where the drafts are to be.

        Args:
            hidden_states: [R, H]. The other arguments are vLLM's; those that only some of its versions hand over,
                among ``others``.

        Returns:
            int64 [R] token ids of the target's vocabulary.
        """
        keys = (sample_src_positions, idx_mapping, temperature, seeds)
        if self.samples_natively(draft_logits):  # type: ignore[attr-defined]
            return super().sample_draft(  # type: ignore[misc]
                hidden_states, *keys, draft_step, draft_logits, spec_step_idx, **others
            )
        coupling = self.coupling(idx_mapping, sample_src_positions, temperature, seeds)  # type: ignore[attr-defined]
        return self.head.choose(hidden_states, coupling)  # type: ignore[attr-defined]

    def _copy_request_inputs(
        self,
        num_reqs: int,
        idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dummy_run: bool = False,
    ) -> None:
        """vLLM's four launches as one; a made-up batch names no slots, for theirs may be others' by now."""
        copy_requests(
            from_mapping=idx_mapping,
            from_temperature=temperature,
            from_seeds=seeds,
            idx_mapping=self.idx_mapping,  # type: ignore[attr-defined]
            temperature=self.temperature,  # type: ignore[attr-defined]
            seeds=self.seeds,  # type: ignore[attr-defined]
            num_reqs=0 if dummy_run else num_reqs,
        )


def empty_tree(num_reqs: int, num_nodes: int, device: torch.device) -> TokenTree:
    """Persistent buffers for the trees of ``num_reqs`` requests."""
    return TokenTree(
        tokens=torch.zeros(num_reqs, num_nodes, dtype=torch.int64, device=device),
        parents=torch.zeros(num_reqs, num_nodes, dtype=torch.int32, device=device),
        log_probs=torch.zeros(num_reqs, num_nodes, dtype=torch.float32, device=device),
        sizes=torch.zeros(num_reqs, dtype=torch.int32, device=device),
    )


def first_rows(tree: TokenTree, num_reqs: int) -> TokenTree:
    """The trees of the first requests, as views."""
    return TokenTree(*(part[:num_reqs] for part in tree))
