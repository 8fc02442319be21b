"""The router: once a round, it chooses a drafter for every request, on the device.

Shape legend: R requests of the batch, S most requests, L logits rows, V vocabulary, T target tokens of the step,
H hidden size, N drafters, the last of which is the reference, B measured batch sizes.
"""

from typing import NamedTuple

import torch

from vllm_crossspec.router import kernels
from vllm_crossspec.router.checkpoint import RouterCheckpoint
from vllm_crossspec.router.costs import RoundCosts, Table, auto_thresholds
from vllm_crossspec.router.drift import Drift
from vllm_crossspec.router.experience import Experience
from vllm_crossspec.router.policies import policy_kind

_RULES = {
    "fixed": kernels.FIXED,
    "entropy": kernels.ENTROPY,
    "neural": kernels.NEURAL,
    "goodput": kernels.GOODPUT,
}


class RouterSettings(NamedTuple):
    """What a router goes by.

    Attributes:
        policy: an entry of the registry (``router.policies``).
        drafters: [N] names in routing order.
        thresholds: [N - 1] numbers for every batch size, or None for "auto": what ``costs`` and ``checkpoint`` say.
        checkpoint: the trained router, if there is one.
        costs: of a round, as measured; None where they were not: all drafters then cost the same.
        fixed: number of the drafter of policy ``fixed``.
        owners: [N] whose cache each drafter uses, as numbers of drafters; None: each its own.
        priors: [N] tokens of a round with each before anything is known; None: all the same.
        tried: of a policy that learns, drafters that are tried every now and then; None: all of them.
        correct: whether a trained router's predictions are corrected by what a request's own rounds have brought.
        by_category: thresholds of requests that name a category, [N - 1] for each; all others go by ``thresholds``.
        tempers: whether the entropy is that of the distribution at the request's temperature, not at 1.
    """

    policy: str
    drafters: tuple[str, ...]
    thresholds: tuple[float, ...] | None = None
    checkpoint: RouterCheckpoint | None = None
    costs: RoundCosts | None = None
    fixed: int = 0
    owners: tuple[int, ...] | None = None
    priors: tuple[float, ...] | None = None
    tried: tuple[int, ...] | None = None
    correct: bool = True
    by_category: tuple[tuple[float, ...], ...] = ()
    tempers: bool = False


class Router:
    """Routes a batch's requests; all buffers are allocated here, once.

    Args:
        settings: what it goes by.
        hidden_size, vocab_size: H, V of the target.
        max_num_reqs: S.
        dtype: of the target's hidden states.
        device: where all of it lives.

    Attributes:
        previous: int32 [S] by slot: the drafter that drafted last, -1 for none.
        entropy: float32 [S] nats, and gains: float32 [S, N - 1] tokens: what the last decision went by, by row of its
            batch; only what the policy looks at.
        own: float32 [S, N, 2] by slot: tokens and rounds of its request with each drafter, where predictions are
            corrected.
        categories: int32 [S] by slot: the number of its request's category, 0 for none.
        scales: float32 [S] by slot: 1 / temperature of its request, 1 for a greedy one; None where the entropy is that
            of the logits as they come.
        num_launches: kernel launches of a round.
        experience: what drafts have been worth, where the policy goes by that; else None.
        drift: how costs have changed since they were measured, where the policy goes by experience; None where it does
            not, or costs were given.
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
        assert others >= 1 and 0 <= settings.fixed <= others
        assert settings.checkpoint is not None or not kind.needs_checkpoint
        self.settings, self.device = settings, device
        self.experience: Experience | None = None
        if kind.learns and settings.checkpoint is None:
            self.experience = _experience(settings, max_num_reqs, device)
        self.needs_logits = kind.needs_logits or self.experience is not None
        self.needs_hidden = kind.needs_hidden and self.experience is None
        self.num_launches = 1 + self.needs_logits + self.needs_hidden + 2 * (self.experience is not None)

        def filled(*shape: int, value: float = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        self.previous = filled(max_num_reqs, value=-1, dtype=torch.int32)
        self.categories = filled(max_num_reqs, dtype=torch.int32)
        self.scales = filled(max_num_reqs, value=1) if settings.tempers else None
        self.entropy, self.gains = filled(max_num_reqs), filled(max_num_reqs, others)
        # Buffers that the policy does not use are there all the same, of the smallest size: kernels take no None.
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
        self.drift: Drift | None = None
        self.set_costs(settings.costs)

    def _load(self, checkpoint: RouterCheckpoint, dtype: torch.dtype) -> None:
        exact = {"device": self.device, "dtype": torch.float32}
        self._w1 = checkpoint.hidden_weight.to(device=self.device, dtype=dtype).contiguous()
        self._b1 = checkpoint.hidden_bias.to(**exact).contiguous()
        self._w2 = checkpoint.gain_weight.to(**exact).contiguous()
        self._gain_bias = checkpoint.gain_bias.to(**exact).contiguous()

    @property
    def num_bytes(self) -> int:
        """Device memory of all buffers and weights."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, torch.Tensor))

    def set_costs(self, costs: RoundCosts | None) -> None:
        """Go by these costs from now on; "auto" thresholds follow them. Allocates: not for the decoding path.

        Args:
            costs: None where there are none: every round then costs the same, and a switch nothing.
        """
        settings, num_drafters = self.settings, len(self.settings.drafters)
        self.costs = costs
        is_measured = costs is not None and costs is not settings.costs
        self.drift = Drift(costs) if costs is not None and is_measured and self.experience is not None else None
        facts = settings.checkpoint.facts if settings.checkpoint else None
        if settings.thresholds is not None:
            rows: Table = (settings.thresholds,) * (len(costs.batch_sizes) if costs else 1)
        else:
            rows = auto_thresholds(settings.policy, costs, facts, num_drafters)
        self.thresholds = rows
        seconds: list[tuple[tuple[float, ...], tuple[float, ...]]] = [((1.0,) * num_drafters, (0.0,) * num_drafters)]
        parts: list[Table] = [((0.0,) * num_drafters, (1.0,) * num_drafters, (0.0,) * num_drafters)]
        if costs is not None:
            parts = [(costs.draft[row], costs.verify[row], costs.switch[row]) for row in range(len(costs.batch_sizes))]
            seconds = [(costs.round_seconds(row), costs.switch[row]) for row in range(len(costs.batch_sizes))]
        by_category = [[row, *settings.by_category] for row in rows]
        self._thresholds = torch.tensor(by_category, dtype=torch.float32, device=self.device)
        self._seconds = torch.tensor(seconds, dtype=torch.float32, device=self.device)
        self._parts = torch.tensor(parts, dtype=torch.float32, device=self.device)
        self._measured_parts, self._factors = self._parts.clone(), torch.ones_like(self._parts[:, :1])
        self._factors_on_host = torch.ones(self._factors.shape, pin_memory=self.device.type == "cuda")

    def follow_drift(self) -> None:
        """Go by costs as they are now, by what :attr:`drift` was shown; a small copy to the device, no wait."""
        if self.drift is not None:
            self._factors_on_host[:, 0] = torch.tensor(self.drift.factors())
            self._factors.copy_(self._factors_on_host, non_blocking=True)
            torch.mul(self._measured_parts, self._factors, out=self._parts)

    def warm_up(self, logits: torch.Tensor, hidden_states: torch.Tensor) -> None:
        """Compile every variant that batches of any size use, so that no request waits for it; changes no state.

        Args:
            logits: [at least 1, V] and hidden_states: [at least 1, H], of the types that come in rounds; unread.
        """
        padding = torch.full_like(self.previous, -1)
        rows, sampled = padding.long(), torch.zeros_like(padding)
        for num_reqs in kernels.batch_variants(self.previous.shape[0]):
            self.observe_logits(logits, rows[:num_reqs], padding[:num_reqs])
            self.decide(hidden_states, rows[:num_reqs], padding[:num_reqs], sampled, torch.empty_like(padding))
        if self.experience is not None:
            self.experience.num_rounds = 0

    def observe_logits(self, logits: torch.Tensor, rows: torch.Tensor, idx_mapping: torch.Tensor) -> None:
        """Take what the entropy needs from the target's logits: one launch, none where the policy needs no entropy.

        The distribution is the one that the logits stand for as they come, at temperature 1, so that a threshold means
        the same for greedy and for sampled requests; or, under ``tempers``, the one at the request's temperature, as
        in the paper (section 3.3.1: sampling has its probabilities at hand). No top-k, top-p or penalty is applied.

        Args:
            logits: float [L, V] in any precision; -inf forbids a token.
            rows: int64 [R] the row of each request's last accepted position; negative for none.
            idx_mapping: int [R] slot of each request; negative: padding.
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
    ) -> None:
        """Choose a drafter for every request: one launch, two where the policy reads the hidden state, three where
        it learns.

        Args:
            hidden_states: [T, H] final states of the target, after its last norm.
            rows: int64 [R] the row of each request's last accepted position; negative for none.
            idx_mapping: int [R] slot of each request, the same order as in :meth:`observe_logits`; negative: padding.
            num_sampled: int32 [R] tokens accepted in this step; 0 inside a prompt.
            out_routes: int32 [at least R], written: number of the drafter in routing order; -1 for padding and for
                requests that are inside their prompts.
        """
        num_reqs, blocks = idx_mapping.shape[0], 1
        row = self.costs.row(num_reqs) if self.costs else 0
        if self.experience is not None:
            batch = (idx_mapping, num_sampled, self.previous)
            self.experience.decide(self._parts[row], self._entropy_parts, *batch, out_routes)
            return
        if self.needs_hidden:
            blocks = kernels.gain_parts(
                hidden_states=hidden_states, rows=rows, w1=self._w1, b1=self._b1, w2=self._w2, parts=self._gain_parts
            )
        rule = kernels.Rule(
            _RULES[self.settings.policy],
            self.settings.fixed,
            self._thresholds[row],
            self._seconds[row],
            self._mean_lengths,
            self._corrects,
        )
        kernels.decide(
            rule=rule,
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
        """Whether routes depend on what a request is, beside what its text is; see :meth:`admit`."""
        return bool(self.settings.by_category) or self.scales is not None

    def admit(self, slots: torch.Tensor, categories: torch.Tensor, temperatures: torch.Tensor) -> None:
        """Note what the requests are that have come into ``slots`` (int64 [n]).

        Args:
            categories: int32 [n] number of each one's category: 0 for none, else 1 + its place in ``by_category``.
            temperatures: float32 [n], 0 for a greedy one.
        """
        self.categories.index_copy_(0, slots, categories)
        if self.scales is not None:
            self.scales.index_copy_(0, slots, torch.where(temperatures > 0, 1.0 / temperatures, 1.0))

    def release(self, slots: torch.Tensor) -> None:
        """Forget what ``slots`` (int64 [n]) did, for the requests that come into them."""
        self.previous.index_fill_(0, slots, -1)  # an assignment by index would wait for the device
        if self._corrects:
            self.own.index_fill_(0, slots, 0.0)
        if self.experience is not None:
            self.experience.release(slots)


def _experience(settings: RouterSettings, max_num_reqs: int, device: torch.device) -> Experience:
    num_drafters = len(settings.drafters)
    owners, priors = settings.owners or tuple(range(num_drafters)), settings.priors or (1.0,) * num_drafters
    tried = tuple(range(num_drafters)) if settings.tried is None else settings.tried
    return Experience(owners, priors, tried, max_num_reqs, device)
