"""The registry of routing policies. It needs neither torch nor Triton, so that configurations are checked quickly."""

from typing import NamedTuple

from vllm_crossspec.names import look_up


class PolicyKind(NamedTuple):
    """One way to choose a drafter.

    Attributes:
        name: as users write it.
        description: one line, for messages and ``--help``.
        needs_logits: reads the target's logits (their entropy).
        needs_hidden: reads the target's final hidden state.
        needs_checkpoint: cannot do without a trained router.
        uses_costs: weighs the drafters' costs in every round; for the others they only set "auto" thresholds.
        takes_threshold: has thresholds that users may set.
        learns: without a trained router it goes by what drafts have been worth (``router.experience``).
    """

    name: str
    description: str
    needs_logits: bool = False
    needs_hidden: bool = False
    needs_checkpoint: bool = False
    uses_costs: bool = False
    takes_threshold: bool = False
    learns: bool = False


KINDS = {
    kind.name: kind
    for kind in (
        PolicyKind("fixed", "always the same drafter"),
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
            "most expected tokens per second: what drafts have been worth, or a trained router's gains, over what "
            "rounds cost, measured at start-up",
            needs_hidden=True,
            uses_costs=True,
            learns=True,
        ),
    )
}


def policy_kind(name: str, key: str) -> PolicyKind:
    """The policy called ``name``.

    Raises:
        ValueError: there is none; the sentence names ``key`` and the nearest policy.
    """
    return look_up(name, KINDS, key, "routing policy")
