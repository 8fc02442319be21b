"""Made-up text, and an n-gram store of it, for a machine that has neither a corpus nor the time to count one."""

import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from crossspec_tools.ngram.build import build, make_plan

NUM_TOKENS = 4_000_000
DOCUMENT = 2000


def zipf_tokens(num_tokens: int, vocab_size: int, seed: int = 0) -> npt.NDArray[np.int32]:
    """Tokens with Zipf's frequencies (token 0 the most frequent), half of them drawn given the one before.

    The latter are one of eight favourites of the token before, so that n-grams come again.

    Returns:
        int32 [num_tokens], -1 where a document ends.
    """
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, vocab_size + 1) ** 1.05
    table = np.cumsum(weights / weights.sum())
    ids = np.searchsorted(table, rng.random(num_tokens))
    follows = rng.random(num_tokens) < 0.5
    follows[0] = False
    favourite = rng.integers(0, 8, num_tokens)
    ids[1:] = np.where(follows[1:], (ids[:-1] * 7919 + favourite[1:] * 104_729) % vocab_size, ids[1:])
    ids = np.minimum(ids, vocab_size - 1)
    ids[::DOCUMENT] = -1
    return ids.astype(np.int32)


def write_store(path: Path, vocab_size: int) -> Path:
    """An order-3 store of made-up text with the given vocabulary; one core makes it in less than a minute.

    Every token that a drafter of 32,000 tokens knows has been seen, if they are the lowest ids, as dummy weights have
    it: whatever such a drafter drafts, lookups search the children of a node.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "tokens.npy"
        np.save(text, zipf_tokens(min(NUM_TOKENS, 200 * vocab_size), vocab_size))
        build(make_plan([text], order=3, vocab_size=vocab_size), path)
    return path
