"""Drafters without weights beside vLLM's and Arctic's: tokens a round on greedy responses, without an engine.

    python benchmarks/lookup_offline.py --responses work/responses
    python benchmarks/lookup_offline.py --responses work/responses --share --json work/lookup.json

A greedy response is the target's own path: whatever a draft has of it would be accepted. Each drafter goes through
every response round by round, with the text that it would have seen: the prompt, what was accepted, and with
``--share`` the responses before this one, in the order of the files. Ours are the plain loops that the kernels are
tested against; vLLM's is the search of its ``ngram``; SuffixDecoding's is Arctic Inference's own code where that
package is installed (``pip install --no-deps arctic-inference``), as vLLM's ``suffix`` sets it (a chain of up to 24,
no longer than the match, of tokens above 0.1) and as a tree without these limits. Intervals are 95 %, from drawing
other responses (bootstrap). Needs no GPU.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from intervals import Walk, rate
from rich.console import Console
from rich.progress import track
from rich.table import Table

from vllm_crossspec.cli import meta, options
from vllm_crossspec.lookup.naive import Match, agreeing, match_tree_naive, own_matches_naive
from vllm_crossspec.training.generations import Generation, read_generations

NGRAM = {"max_match": 8, "min_match": 2, "num_matches": 8}
SUFFIX = {"max_match": 16, "min_match": 1, "num_matches": 16}
"""What they compare if nothing is said."""

Paths = Sequence[tuple[int, ...]]
"""The nodes of a draft, each the tokens that lead to it."""


class Ours:
    """``ngram`` or ``suffix`` of this package.

    Args:
        num_nodes: of its tree; 0 drafts a chain, what followed the longest match.
        depth: most tokens one after another.
        share: draft from earlier responses, too.
        search: ``max_match``, ``min_match`` and ``num_matches``.
    """

    def __init__(self, num_nodes: int, depth: int, share: bool, search: dict[str, int]):
        self._num_nodes, self._depth, self._share, self._search = num_nodes, depth, share, search
        self._ends: dict[int, list[tuple[list[int], int]]] = defaultdict(list)

    def draft(self, text: list[int]) -> Paths:
        own = own_matches_naive(text, **self._search, depth=self._depth)
        if not self._num_nodes:
            return [own[0].continuation[: i + 1] for i in range(self._depth)] if own else []
        return [*match_tree_naive([*own, *self._earlier(text)], self._search["max_match"], self._num_nodes)]

    def end(self, response: list[int]) -> None:
        """The response is whole, and may be drafted from."""
        if self._share:
            for end, token in enumerate(response[:-1]):
                self._ends[token].append((response, end))

    def _earlier(self, text: list[int]) -> list[Match]:
        """All places of the longest context that an earlier response has."""
        found = [
            (agreeing(output, end, text, self._search["max_match"]), output, end)
            for output, end in self._ends.get(text[-1], ())
        ]
        longest = max((length for length, _, _ in found), default=0)
        wanted = [one for one in found if one[0] == longest >= self._search["min_match"]]
        return [Match(length, tuple(output[end + 1 : end + 1 + self._depth])) for length, output, end in wanted]


class Vllm:
    """The search of vLLM's ``ngram``: what followed the longest match of the last tokens."""

    def __init__(self, num_tokens: int, least: int, most: int):
        from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as search

        self._search, self._sizes, self._num_tokens = search, (least, most), num_tokens

    def draft(self, text: list[int]) -> Paths:
        least, most = self._sizes
        found = self._search(np.array(text, dtype=np.int32), least, most, 1 << 20, self._num_tokens).tolist()
        return [tuple(found[: i + 1]) for i in range(len(found))]

    def end(self, response: list[int]) -> None:
        """It keeps nothing."""


class Arctic:
    """SuffixDecoding by its authors' package.

    Args:
        num_tokens: most of a draft.
        factor: a draft is at most so many times as long as the match.
        least_prob: of a token that is drafted.
        is_tree: whether a draft is a tree, else a chain.
        share: draft from earlier responses, too.
    """

    def __init__(self, num_tokens: int, factor: float, least_prob: float, is_tree: bool, share: bool):
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self._cache = SuffixDecodingCache(max_tree_depth=24, max_cached_requests=-1 if share else 0)
        self._how = {
            "max_spec_tokens": num_tokens,
            "max_spec_factor": factor,
            "min_token_prob": least_prob,
            "use_tree_spec": is_tree,
        }
        self._number, self._prompt, self._seen = 0, 0, 0

    def draft(self, text: list[int]) -> Paths:
        if not self._seen:
            self._prompt = self._seen = len(text) - 1  # the first token of the response is there already
            self._cache.start_request(self._number, np.array(text[:-1], dtype=np.int32))
        self._add(text[self._seen :])
        found = self._cache.speculate(self._number, np.array(text[-24:], dtype=np.int32), **self._how)
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(found.token_ids, found.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        return paths

    def end(self, response: list[int]) -> None:
        """The next response is another request's, and may be drafted from this one where they are shared."""
        if self._seen:
            self._add(response[self._seen - self._prompt :])
            self._cache.stop_request(self._number)
        self._number, self._seen = self._number + 1, 0

    def _add(self, tokens: list[int]) -> None:
        self._cache.add_active_response(self._number, np.array(tokens, dtype=np.int32))
        self._seen += len(tokens)


class Decoded(NamedTuple):
    """What a drafter came to, by response.

    Attributes:
        tokens: int64 [B], decoded in rounds: all but a response's first.
        rounds: int64 [B].
        drafts: int64 [B], nodes that the target verified.
    """

    tokens: np.ndarray
    rounds: np.ndarray
    drafts: np.ndarray

    def of(self, which: np.ndarray) -> Walk:
        """Of some responses, bool [B]."""
        return Walk(self.tokens[which], self.rounds[which])


def walk(drafter: Any, rows: Sequence[Generation]) -> Decoded:
    """Take a drafter through all responses. The first token of each is the prefill's."""
    found = []
    for row in rows:
        place = 1
        rounds = drafts = 0
        while place < len(row.response_ids):
            paths = {tuple(path) for path in drafter.draft([*row.prompt_ids, *row.response_ids[:place]])}
            ahead, accepted = tuple(row.response_ids[place:]), 0
            while accepted < len(ahead) - 1 and ahead[: accepted + 1] in paths:
                accepted += 1
            place, rounds, drafts = place + accepted + 1, rounds + 1, drafts + len(paths)
        drafter.end(row.response_ids)
        found.append((len(row.response_ids) - 1, rounds, drafts))
    return Decoded(*np.array(found, dtype=np.int64).T)


def drafters(share: bool) -> dict[str, Callable[[], Any]]:
    """By name, each made when its turn comes."""
    found: dict[str, Callable[[], Any]] = {
        "vLLM's ngram, chain of 8": lambda: Vllm(8, 2, 8),
        "ours, ngram, chain of 8": lambda: Ours(0, 8, False, NGRAM),
        "ours, ngram, tree of 16": lambda: Ours(16, 8, False, NGRAM),
    }
    if find_spec("arctic_inference"):
        found |= {
            "Arctic's suffix, chain, as vLLM sets it": lambda: Arctic(24, 1.0, 0.1, False, share),
            "Arctic's suffix, tree of 16, no limits": lambda: Arctic(16, 1e3, 0.0, True, share),
            "Arctic's suffix, tree of 60, no limits": lambda: Arctic(60, 1e3, 0.0, True, share),
        }
    found["ours, suffix, tree of 16"] = lambda: Ours(16, 16, share, SUFFIX)
    found["ours, suffix, tree of 60"] = lambda: Ours(60, 16, share, SUFFIX)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--responses", type=Path, required=True, help="folder that `crossspec train generate` wrote")
    add("--split", default="dev", help="which of its shards: dev or train")
    add("--rows", type=int, default=None, help="at most so many responses")
    add("--share", action="store_true", help="suffix may draft from the responses before")
    add("--json", type=Path, default=None, help="write the figures there")
    given = parser.parse_args(arguments)
    options.check_file("--json", given.json)
    if not list(given.responses.glob(f"{given.split}-*.jsonl.gz")):
        raise ValueError(f"--responses {given.responses}: no {given.split}-*.jsonl.gz; see `crossspec train generate`")
    rows = [row for row in read_generations(given.responses, given.split, 1 << 31) if row.greedy][: given.rows]
    if not rows:
        raise ValueError(f"--responses {given.responses}: no greedy response in {given.split}-*.jsonl.gz")
    if not find_spec("arctic_inference"):
        print("arctic_inference is not installed: its suffix is left out", file=sys.stderr)
    kinds = np.array([row.category for row in rows])
    table = Table("drafter", "tokens a round", *sorted({*kinds}), "drafts a round")
    document = []
    makers = drafters(given.share)
    for name in track(makers, "drafters", console=Console(stderr=True)):
        result = walk(makers[name](), rows)
        figures = {kind: rate(result.of(kinds == kind)) for kind in sorted({*kinds})}
        overall, verified = rate(result.of(kinds != "")), float(result.drafts.sum() / result.rounds.sum())
        cells = [f"{figure:.2f}" for figure in (overall, *figures.values())]
        table.add_row(name, *cells, f"{verified:.1f}")
        document.append({"drafter": name, "all": overall, **figures, "drafts_per_round": verified})
    Console(width=170).print(table)
    settings = {"responses": len(rows), "split": given.split, "share": given.share}
    options.write_json(given.json, {"rows": document, "meta": {"settings": settings, "hardware": meta.hardware()}})
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        sys.exit(str(error))
