"""The registry of routing policies. It needs neither torch nor Triton, so that configurations are checked quickly."""

from typing import NamedTuple

from vllm_crossspec.kinds.registry import Registry


class PolicyKind(NamedTuple):
    """One way to choose a drafter.

    Attributes:
        is_fixed: it is always one drafter, and no other is loaded.
        records: every drafter drafts, and nothing is verified.
        needs_logits, needs_hidden: it reads the target's logits (their entropy), or the final hidden state.
        needs_checkpoint: cannot do without a trained router.
        uses_costs: weighs the drafters' costs in every round; for the others they only set "auto" thresholds.
        learns: without a trained router it goes by what drafts have been worth (``routing.experience``).
        decider: ``module:function`` that is called as ``routing.kernels.decide``, which knows this project's policies;
            empty where no router decides.
    """

    name: str
    description: str
    is_fixed: bool = False
    records: bool = False
    needs_logits: bool = False
    needs_hidden: bool = False
    needs_checkpoint: bool = False
    uses_costs: bool = False
    takes_threshold: bool = False
    learns: bool = False
    decider: str = "vllm_crossspec.routing.kernels:decide"


_OWN = (
    PolicyKind("fixed", "always router.drafter, which alone is loaded", is_fixed=True, decider=""),
    PolicyKind(
        "entropy",
        "the autoregressive drafter where the target is uncertain: entropy above a threshold, nats",
        needs_logits=True,
        takes_threshold=True,
    ),
    PolicyKind(
        "neural",
        "a trained router predicts how many more tokens each drafter would have accepted than the reference",
        needs_hidden=True,
        needs_checkpoint=True,
        takes_threshold=True,
    ),
    PolicyKind(
        "goodput",
        "most expected tokens per second: what drafts have been worth, or a trained router's gains, over what rounds "
        "cost, measured at start-up",
        needs_hidden=True,
        uses_costs=True,
        learns=True,
    ),
    PolicyKind("record", "all drafters draft and nothing is verified (`crossspec collect`)", records=True, decider=""),
)
KINDS = {kind.name: kind for kind in _OWN}
REGISTRY = Registry("crossspec.policies", "routing policy", PolicyKind, KINDS)
policy_kind, policy_kinds = REGISTRY.find, REGISTRY.names
