"""The router: it chooses a drafter for every request once per round, on the device.

Shape legend: R requests of the batch, S most requests, L logits rows, V vocabulary, T target tokens of the step,
H hidden size, N drafters (the last one is the reference), B measured batch sizes.
"""

from typing import NamedTuple

import torch

from vllm_crossspec.kinds.policy import policy_kind
from vllm_crossspec.kinds.registry import load
from vllm_crossspec.load.costs import Drift, RoundCosts, Table
from vllm_crossspec.routing import kernels
from vllm_crossspec.routing.checkpoint import RouterCheckpoint
from vllm_crossspec.routing.experience import Experience
from vllm_crossspec.routing.thresholds import auto_thresholds

_RULES = {"entropy": kernels.ENTROPY, "neural": kernels.NEURAL, "goodput": kernels.GOODPUT}


class RouterSettings(NamedTuple):
    """Settings of a router."""

    policy: str  # an entry of the registry (`kinds.policy`)
    drafters: tuple[str, ...]  # [N] names in routing order
    thresholds: tuple[float, ...] | None = None  # [N - 1] for every batch size; None: from costs and checkpoint
    checkpoint: RouterCheckpoint | None = None  # the trained router, if there is one
    costs: RoundCosts | None = None  # None: unmeasured, and all drafters cost the same
    owners: tuple[int, ...] | None = None  # [N] owner of each drafter's cache, as a number; None: each its own
    priors: tuple[float, ...] | None = None  # [N] expected tokens of a round before any is known; None: equal
    explored: tuple[int, ...] | None = None  # drafters that a learning policy tries at intervals; None: all
    correct: bool = True  # whether a request's own rounds correct a trained router's predictions
    by_category: tuple[tuple[float, ...], ...] = ()  # [N - 1] thresholds for each category that requests may name
    uses_temperature: bool = False  # whether the entropy is taken at the request's temperature instead of 1
    is_late: bool = False  # whether rounds may carry out the decision of the round before


class Router:
    """Routes a batch's requests; allocates all its buffers once.

    Args:
        hidden_size, vocab_size, max_num_reqs: H, V, S.
        dtype: of the target's hidden states.

    Attributes:
        previous, own, categories, scales: by slot, see ``kernels``.
        entropy, gains: float32 [S] nats and float32 [S, N - 1] tokens: inputs of the last decision by row of its
            batch, if the policy reads them.
        experience: of a learning policy; else None.
        drift: of a learning policy without given costs; else None.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        hidden_size: int,
        vocab_size: int,
        max_num_reqs: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        kind = policy_kind(settings.policy, "router.policy")
        others = len(settings.drafters) - 1
        assert others >= 1
        assert settings.checkpoint is not None or not kind.needs_checkpoint
        self.settings, self.device, self._decide = settings, device, load(kind.decider)
        self._policy = _RULES.get(settings.policy, kernels.OTHER)
        self.experience: Experience | None = None
        if kind.learns and settings.checkpoint is None:
            everyone = tuple(range(others + 1))
            explored = everyone if settings.explored is None else settings.explored
            priors = settings.priors or (1.0,) * (others + 1)
            owners = settings.owners or everyone
            self.experience = Experience(owners, priors, explored, max_num_reqs, device, settings.is_late)
        self.needs_logits = kind.needs_logits or self.experience is not None
        self.needs_hidden = kind.needs_hidden and self.experience is None

        def filled(*shape: int, value: float = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        self.previous = filled(max_num_reqs, value=-1, dtype=torch.int32)
        self.categories = filled(max_num_reqs, dtype=torch.int32)
        self.scales = filled(max_num_reqs, value=1) if settings.uses_temperature else None
        self.entropy, self.gains = filled(max_num_reqs), filled(max_num_reqs, others)
        # Kernels do not take None, so unused buffers have the smallest size.
        splits = kernels.entropy_splits(vocab_size) if self.needs_logits else 1
        self._entropy_parts = filled(max_num_reqs if self.needs_logits else 1, splits, 3)
        self._gain_bias = filled(others)
        self._gain_parts = filled(1)
        if self.needs_hidden:
            assert settings.checkpoint is not None
            self._load(settings.checkpoint, dtype)
            assert self._w1.shape[1] == hidden_size and self._w2.shape[0] == others
            blocks = kernels.max_gain_blocks(self._w1.shape[0])
            self._gain_parts = filled(max_num_reqs * blocks * others)
        lengths = settings.checkpoint.facts.mean_lengths if settings.checkpoint else (1.0,) * (others + 1)
        self._mean_lengths = torch.tensor(lengths, dtype=torch.float32, device=device)
        self._corrects = self.needs_hidden and settings.correct
        self.own = filled(max_num_reqs if self._corrects else 1, others + 1, 2)
        self.set_costs(settings.costs)

    def _load(self, checkpoint: RouterCheckpoint, dtype: torch.dtype) -> None:
        exact = {"device": self.device, "dtype": torch.float32}
        self._w1 = checkpoint.hidden_weight.to(device=self.device, dtype=dtype).contiguous()
        self._b1 = checkpoint.hidden_bias.to(**exact).contiguous()
        self._w2 = checkpoint.gain_weight.to(**exact).contiguous()
        self._gain_bias = checkpoint.gain_bias.to(**exact).contiguous()

    def set_costs(self, costs: RoundCosts | None) -> None:
        """Use these costs from now on, also for "auto" thresholds; None: rounds cost the same, and switches nothing.

        It allocates, so do not call it while decoding.
        """
        settings, num_drafters = self.settings, len(self.settings.drafters)
        self.costs = costs
        follows = costs is not settings.costs and self.experience is not None
        self.drift = Drift(costs) if costs is not None and follows else None
        facts = settings.checkpoint.facts if settings.checkpoint else None
        if settings.thresholds is not None:
            rows: Table = (settings.thresholds,) * (len(costs.batch_sizes) if costs else 1)
        else:
            rows = auto_thresholds(settings.policy, costs, facts, num_drafters)
        self.thresholds = rows
        none, one = (0.0,) * num_drafters, (1.0,) * num_drafters
        costs = costs or RoundCosts((1,), (none,), (one,), (none,))
        parts = list(zip(costs.draft, costs.verify, costs.switch, strict=True))
        seconds = [(costs.round_seconds(row), switch) for row, switch in enumerate(costs.switch)]
        by_category = [[row, *settings.by_category] for row in rows]
        exact = {"dtype": torch.float32, "device": self.device}
        self._thresholds, self._seconds = torch.tensor(by_category, **exact), torch.tensor(seconds, **exact)
        self._parts = torch.tensor(parts, **exact)
        self._measured_parts, self._factors = self._parts.clone(), torch.ones_like(self._parts[:, :1])

    def follow_drift(self) -> None:
        """Use the costs observed by :attr:`drift`; a small copy to the device, no wait."""
        if self.drift is not None:
            # A new tensor: the device may not have read the last one yet.
            factors = torch.tensor(self.drift.factors(), pin_memory=self.device.type == "cuda")
            self._factors.copy_(factors[:, None], non_blocking=True)
            torch.mul(self._measured_parts, self._factors, out=self._parts)

    def warm_up(self, logits: torch.Tensor, hidden_states: torch.Tensor) -> None:
        """Compile every kernel variant that batches use, so that no request waits; changes no state.

        The arguments are [at least 1, V] and [at least 1, H] of the rounds' types; their values do not matter.
        """
        padding = torch.full_like(self.previous, -1)
        rows, sampled = padding.long(), torch.zeros_like(padding)
        for num_reqs in kernels.batch_variants(self.previous.shape[0]):
            self.observe_logits(logits, rows[:num_reqs], padding[:num_reqs])
            self.decide(hidden_states, rows[:num_reqs], padding[:num_reqs], sampled, torch.empty_like(padding))
        if self.experience is not None:
            self.experience.num_rounds = 0

    def observe_logits(self, logits: torch.Tensor, rows: torch.Tensor, idx_mapping: torch.Tensor) -> None:
        """Reduce the target's logits to parts of the entropy: one launch, none if the policy needs no entropy.

        The distribution is at temperature 1, so a threshold means the same for greedy and sampled requests. With
        ``uses_temperature`` it is at the request's temperature, as in the paper (section 3.3.1). Top-k, top-p and
        penalties are not applied. ``rows`` are the last accepted positions'.
        """
        if self.needs_logits:
            kernels.entropy_parts(
                logits=logits, rows=rows, parts=self._entropy_parts, scales=self.scales, idx_mapping=idx_mapping
            )

    def decide(
        self,
        hidden_states: torch.Tensor,
        rows: torch.Tensor,
        idx_mapping: torch.Tensor,
        num_sampled: torch.Tensor,
        out_routes: torch.Tensor,
        carries_out: bool = True,
    ) -> None:
        """Choose a drafter for every request: one launch, two if the policy reads hidden states, three if it learns.

        Args:
            hidden_states: [T, H] final states of the target, after its last norm.
            rows, idx_mapping, num_sampled: int [R], see ``kernels``.
            out_routes: int32 [at least R], written: number of the drafter; -1 for padding and inside prompts.
            carries_out: whether this round drafts as is decided here; else as was decided in the one before.
        """
        num_reqs, blocks = idx_mapping.shape[0], 1
        row = self.costs.row(num_reqs) if self.costs else 0
        if self.experience is not None:
            batch = (idx_mapping, num_sampled, self.previous)
            self.experience.decide(self._parts[row], self._entropy_parts, *batch, out_routes, carries_out)
            return
        if self.needs_hidden:
            blocks = kernels.gain_parts(
                hidden_states=hidden_states, rows=rows, w1=self._w1, b1=self._b1, w2=self._w2, parts=self._gain_parts
            )
        tables = (self._thresholds[row], self._seconds[row], self._mean_lengths)
        self._decide(
            rule=kernels.Rule(self._policy, *tables, corrects=self._corrects),
            entropy_parts=self._entropy_parts,
            gain_parts=self._gain_parts,
            num_blocks=blocks,
            b2=self._gain_bias,
            idx_mapping=idx_mapping,
            num_sampled=num_sampled,
            previous=self.previous,
            categories=self.categories,
            own=self.own,
            out=kernels.Decision(out_routes, self.entropy, self.gains),
        )

    @property
    def asks_requests(self) -> bool:
        """Whether routes depend on a request's category or temperature; see :meth:`admit`."""
        return bool(self.settings.by_category) or self.scales is not None

    def admit(self, slots: torch.Tensor, categories: torch.Tensor, temperatures: torch.Tensor) -> None:
        """Set the category and temperature of new requests in ``slots`` (int64 [n]).

        Args:
            categories: int32 [n] 0 for none, else 1 + the category's place in ``by_category``.
            temperatures: float32 [n], 0 for a greedy request.
        """
        self.categories.index_copy_(0, slots, categories)
        if self.scales is not None:
            self.scales.index_copy_(0, slots, torch.where(temperatures > 0, 1.0 / temperatures, 1.0))

    def draft_nothing(self, slots: torch.Tensor) -> None:
        """These requests (int64 [n]) get no drafts in this round, which so teaches nothing about a drafter."""
        self.previous.index_fill_(0, slots, -1)
        if self.experience is not None:
            self.experience.drafted.index_fill_(0, slots, -1)

    def release(self, slots: torch.Tensor) -> None:
        """Forget the last requests of ``slots`` (int64 [n])."""
        self.previous.index_fill_(0, slots, -1)  # an indexed assignment would wait for the device
        if self._corrects:
            self.own.index_fill_(0, slots, 0.0)
        if self.experience is not None:
            self.experience.release(slots)
