"""How the nodes of a ``continuity`` tree are scored (Liu et al. 2026, appendix D)."""

from typing import NamedTuple


class Scoring(NamedTuple):
    """How a node's score grows from its parent's: level_weight * (logit_weight * ln p + ngram_weight * ln p_ngram).

    The defaults are the paper's (appendix D). Levels count from 0; level 0 has no n-gram term, as in the authors'
    program. At level i ``logit_weight`` is ``logit_decay ** i`` and ``level_weight`` is ``(i + 1) ** -level_decay``.

    Attributes:
        renormalises: ln p is ln(softmax over the position's given candidates + 1e-10), so that it does not matter
            whether they come as logits or as log-probabilities. False: ln p is what is given, at most 0.
    """

    ngram_weight: float = 0.5
    logit_decay: float = 0.9
    level_decay: float = 0.7
    renormalises: bool = True

    def logit_weight(self, level: int) -> float:
        """What ln p is multiplied by."""
        return float(self.logit_decay**level * (level + 1) ** -self.level_decay)

    def continuity_weight(self, level: int) -> float:
        """What ln p_ngram is multiplied by."""
        return float(self.ngram_weight * (level + 1) ** -self.level_decay) if level else 0.0


def product_scoring(ngram_weight: float) -> Scoring:
    """ln p + ``ngram_weight`` * ln p_ngram without decay: the best prefixes, exactly, by a beam as wide as the tree.

    Such a beam loses nothing: scores only fall along a path, so whatever stands before a node of its level stands
    before its descendants too, and a node with N others of its level before it has no descendant among the best N.
    Without n-grams this is :func:`vllm_crossspec.trees.builders.best_first.best_first`, which then takes one launch.
    """
    return Scoring(ngram_weight, logit_decay=1.0, level_decay=0.0, renormalises=False)
