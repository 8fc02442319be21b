"""The interface that every drafter of this project fits."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_crossspec.config.schema import CrossSpecConfig, DrafterConfig
from vllm_crossspec.drafting.heads import DraftHead, make_head
from vllm_crossspec.drafting.noise import NoiseKeys
from vllm_crossspec.drafting.requests import copy_requests
from vllm_crossspec.types import Candidates, StepInputs, TokenTree


class Proposer(ABC):
    """One drafter in the engine: its weights, KV-cache layers, tapped target layers, and drafts.

    The speculator builds every proposer with a shallow copy of the engine's config, whose ``speculative_config`` is
    this drafter's own. It loads the proposer after the target, and calls it once per round: :meth:`propose_step`, or
    :meth:`catch_up` if the drafter does not draft.

    Attributes:
        name: the user's name for the drafter; its layers' names begin with it, so they differ from other drafters'.
        settings: of the engine, resolved.
        drafter: its own part of the settings.
        drafts_over_trees: whether its own forward passes attend over trees.
        contemplates: whether the target runs contemplate rows for it.
        head: makes draft tokens of its last states; exists after loading.
        engine_config: the engine's own config, with the engine's draft length.
        req_states: the runner's request states.
        num_speculative_steps: K, draft tokens per round.
        draft_attn_layer_names: names of its attention layers, after loading.
        attn_groups: its attention groups, after ``set_attn``.
        draft_logits: [S, K, vocabulary] cache of probabilistic drafts, or None.
    """

    name: str
    settings: CrossSpecConfig
    drafter: DrafterConfig
    drafts_over_trees: bool = False
    contemplates: bool = False
    head: DraftHead
    engine_config: VllmConfig
    vllm_config: VllmConfig
    speculative_config: Any
    draft_attn_layer_names: set[str]
    load_draft_model: Any
    pcp_manager: Any

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Attributes of vLLM's speculators, from which most proposers derive, and those set by our speculator."""

    @staticmethod
    def native_steps(drafter: DrafterConfig) -> int:
        """Draft tokens that the proposer's vLLM base class drafts."""
        return drafter.depth

    def borrow(self, owner: "Proposer", target_model: nn.Module) -> None:
        """Use the model and cache of a loaded proposer of the same kind, with own buffers and graphs."""
        # vLLM's loading uses the returned model as if it had read it.
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
        """The requests of these slots leave: ended, aborted or preempted."""

    # -- the output layer -------------------------------------------------------------------------------------

    @property
    def head_rows_per_req(self) -> int:
        """Most rows per request in one call of the head."""
        return 1

    def load_head(self) -> None:
        """Make the loaded model's head as the settings ask."""
        config = self.engine_config
        self.head = make_head(
            self.model,
            self.drafter,
            is_coupled=self.settings.is_coupled,
            max_rows=self.max_num_reqs * self.head_rows_per_req,
            folder=self.speculative_config.draft_model_config.model,
            vocab_size=config.model_config.get_vocab_size(),
            has_weights=config.load_config.load_format != "dummy",
        )

    def coupling(
        self, idx_mapping: torch.Tensor, positions: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor
    ) -> NoiseKeys | None:
        """Keys of the target's noise for the drafted rows; None if drafts are not coupled."""
        if not self.settings.is_coupled:
            return None
        sharpness = self.drafter.tree.sharpness or 1.0  # for the order of a tree's nodes
        return NoiseKeys(idx_mapping, positions, temperature, seeds, self.use_fp64_gumbel, sharpness)

    # -- for rounds in which others draft, or nobody: what it misses is kept, and caught up with later --------

    def fuse(self, tapped_states: torch.Tensor) -> torch.Tensor:
        """The drafter's features [n, F] of its tapped target states [n, taps * H]."""
        return self.model.combine_hidden_states(tapped_states)

    writes_context = True
    """Whether :meth:`write_context` is supported."""

    @abstractmethod
    def write_context(
        self, features: torch.Tensor, next_tokens: torch.Tensor, positions: torch.Tensor, kv_slots: list[torch.Tensor]
    ) -> None:
        """Write keys and values of accepted tokens.

        Args:
            features: [n, F] of :meth:`fuse`.
            next_tokens: int64 [n] id of the token after each.
            positions: int64 [n].
            kv_slots: int64 [n] cache slot of each token, for every cache group of the drafter.
        """

    def start_rows(self, step: StepInputs) -> StepInputs:
        """Complete the inputs of a round from one row per request; block tables are already the batch's."""
        return step

    def forecast(self, step: StepInputs) -> torch.Tensor | None:
        """float32 [R] draft tokens expected to be accepted; None if that is unknown before drafting."""
        return None

    @property
    def kv_groups(self) -> list[int]:
        """Cache groups of its layers."""
        return [group for group, members in enumerate(self.attn_groups) if members]


class HeadSampling(DraftModelSpeculator, Proposer):
    """A proposer on one of vLLM's speculators, which the derived class adds.

    Difference from vLLM's ``DraftModelSpeculator``: drafts come from a :class:`DraftHead`, if vLLM's sampling does not
    suffice.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, name: str, settings: CrossSpecConfig):
        # Before vLLM's initialiser, which may need sizes that follow from them.
        self.name, self.settings, self.drafter = name, settings, settings.drafters[name]
        super().__init__(vllm_config, device)

    def load_model(self, target_model: nn.Module) -> None:
        super().load_model(target_model)
        self.load_head()

    def samples_natively(self, draft_logits: torch.Tensor | None) -> bool:
        """Whether vLLM's sampling of drafts suffices: it keeps logits, or takes the arg-max shard by shard."""
        is_local = self.use_local_argmax_reduction and not self.settings.is_coupled and self.drafter.head is None
        return draft_logits is not None or self.use_acceptance_estimator or is_local

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
        """Draft tokens int64 [R] of states [R, H], coupled with the target's noise if the settings say so.

        The arguments are vLLM's; ``others`` are those of only some versions.
        """
        if self.samples_natively(draft_logits):
            keys = (sample_src_positions, idx_mapping, temperature, seeds)
            return super().sample_draft(hidden_states, *keys, draft_step, draft_logits, spec_step_idx, **others)
        return self.head.choose(hidden_states, self.coupling(idx_mapping, sample_src_positions, temperature, seeds))

    def _copy_request_inputs(
        self,
        num_reqs: int,
        idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dummy_run: bool = False,
    ) -> None:
        """vLLM's four launches as one; a dummy batch gets no slots, because they may belong to other requests."""
        own = (self.idx_mapping, self.temperature, self.seeds)
        copy_requests((idx_mapping, temperature, seeds), own, 0 if dummy_run else num_reqs)

    def _plan_attention(self, num_reqs: int, attn_metadata: dict[str, Any] | None) -> None:
        """Make the attention's work plan of a pass, captured before it (``prepare`` of its graphs)."""
        if attn_metadata is not None:
            self._update_draft_decode_metadata(attn_metadata, num_reqs)


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
