"""Drafters without weights beside vLLM's and Arctic's: tokens a round on greedy responses, without an engine.

A greedy response is the target's own path: whatever a draft has of it would be accepted. Each drafter goes through
every response round by round, with the text that it would have seen: the prompt, what was accepted, and with
``--share`` the responses before this one, in the order of the files. Ours are the plain loops that the kernels are
tested against, and vLLM's is the search of its ``ngram``. SuffixDecoding's is Arctic Inference's own code, if that
package is installed (``pip install --no-deps arctic-inference``). It runs as vLLM's ``suffix`` sets it (a chain of up
to 24, no longer than the match, of tokens above 0.1), and as a tree without these limits.
"""

from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from intervals import Walk
from texts import add_responses, by_category, read_texts

from crossspec_tools.train.generations import Generation
from papers.base import Figures, PaperTable, say
from vllm_crossspec.drafters.lookup.naive import Match, agreeing, match_tree_naive, own_matches_naive

NGRAM = {"max_match": 8, "min_match": 2, "num_matches": 8}
SUFFIX = {"max_match": 16, "min_match": 1, "num_matches": 16}
"""What they compare if nothing is said."""

Paths = Sequence[tuple[int, ...]]
"""The nodes of a draft, each the tokens that lead to it."""


class Ours:
    """``ngram`` or ``suffix`` of this package; with 0 nodes it drafts a chain, what followed the longest match."""

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
    """SuffixDecoding by its authors' package: tokens above ``least_prob``, at most ``factor`` times the match."""

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
    """What a drafter came to, int64 [B]: tokens but a response's first, rounds, and nodes that the target verified."""

    tokens: np.ndarray
    rounds: np.ndarray
    drafts: np.ndarray


def walk(drafter: Any, rows: Sequence[Generation], depth: int | None = None) -> Decoded:
    """Take a drafter through all responses. The first token of each is the prefill's.

    With ``depth``, only the rounds count that a drafter of so many tokens would count: those with so many tokens ahead.
    """
    found = []
    for row in rows:
        place, end = 1, len(row.response_ids) + (0 if depth is None else 1 - depth)
        rounds = drafts = 0
        while place < end:
            paths = {tuple(path) for path in drafter.draft([*row.prompt_ids, *row.response_ids[:place]])}
            ahead, accepted = tuple(row.response_ids[place:]), 0
            while accepted < (depth or len(ahead) - 1) and ahead[: accepted + 1] in paths:
                accepted += 1
            place, rounds, drafts = place + accepted + 1, rounds + 1, drafts + len(paths)
        drafter.end(row.response_ids)
        found.append((place - 1, rounds, drafts))
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


def add_options(parser: ArgumentParser) -> None:
    add_responses(parser)
    parser.add_argument("--share", action="store_true", help="suffix may draft from the responses before")


def make_table(options: Namespace) -> list[Figures]:
    """Every drafter over the same responses."""
    rows = read_texts(options, 1 << 31)
    if not find_spec("arctic_inference"):
        say("arctic_inference is not installed: its suffix is left out")
    cells, values = [], []
    for name, make in drafters(options.share).items():
        say(name)
        result = walk(make(), rows)
        figures = by_category(Walk(result.tokens, result.rounds), [row.category for row in rows])
        verified = float(result.drafts.sum() / result.rounds.sum())
        cells.append([name, *(f"{figure:.2f}" for figure in figures.values()), f"{verified:.1f}"])
        values.append({"drafter": name, **figures, "drafts_per_round": verified})
    shared = ", which suffix may draft from, too" if options.share else ""
    note = f"{len(rows)} greedy responses of {options.split}{shared}; 95 % intervals, of drawing other responses."
    header = ("drafter", *figures, "drafts a round")
    return [Figures("Tokens a round of drafters without weights", header, cells, values, note)]


TABLES: Mapping[str, PaperTable] = {
    "drafters": PaperTable("ours, vLLM's ngram and Arctic's suffix over the same texts", add_options, make_table)
}
