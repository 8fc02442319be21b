"""DART's own tree search: its C++ compiled from a checkout, and what equality with it means.

Their ``searcher.cpp``, ``trie_ngram.cpp`` and ``buffered_file_reader.cpp`` are compiled as they stand and with their
flags, behind a binding of ours. Their scores are float32 sums from exact counts; ours come from quantised ln p. Two
scores that differ by less than twice the error can so stand in either order, and a tree "ties aside" is one that
Algorithm 1 gives with scores that are each off by at most that error. :func:`is_outcome` decides that, without either
implementation: it searches in float64 from exact counts, and where a cut (of a beam, or of the tree) passes between
scores too close to call, follows every way to make it.
"""

import math
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

Tokens = tuple[int, ...]
EPSILON = 1e-10
ROUNDING = 2e-5
"""Nats of float32 sums of 8 levels, whose terms go down to 1.5 * ln(1e-10)."""
MOST_WAYS = 20_000

SOURCE = r"""
#include <torch/extension.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include "ngram.h"
#include "searcher.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using ngram::TrieNgram;
  using searcher::Searcher;
  pybind11::class_<TrieNgram>(m, "TrieNgram")
      .def(pybind11::init<size_t>())
      .def("add_conversation", &TrieNgram::add_conversation)
      .def("get_probability", &TrieNgram::get_probability)
      .def("save", &TrieNgram::save);
  // Their own binding swaps the names of two arguments; their tree_search.py gives all by position, as here.
  pybind11::class_<Searcher>(m, "Searcher")
      .def(pybind11::init<std::function<prob_t(size_t)>, std::function<prob_t(size_t)>, prob_t, token_t, size_t,
                          size_t>())
      .def("search", &Searcher::search);
}
"""


class Sizes(NamedTuple):
    """Of a search: levels, candidates of each, nodes that are expanded, nodes that are kept."""

    levels: int
    candidates: int
    beam_width: int
    num_nodes: int


class Question(NamedTuple):
    """One search of one request.

    Attributes:
        tokens: of each level's candidates, [K][C].
        shares: float32 softmax over them, as their ``tree_search.py`` takes it, [K][C].
        prompt: the tokens before.
    """

    tokens: list[list[int]]
    shares: list[list[float]]
    prompt: list[int]


def load_searcher(checkout: Path, folder: Path) -> Any:
    """Compile and import their search.

    Args:
        checkout: of https://github.com/fvliang/DART.
        folder: that build files go to; nothing is written into the checkout.

    Raises:
        ValueError: the folder is no such checkout.
    """
    from torch.utils.cpp_extension import load

    library = checkout.resolve() / "dart" / "tree_search" / "cpplib"
    names = ("cpp_search/searcher.cpp", "cpp_ngram/trie_ngram.cpp", "cpp_utils/buffered_file_reader.cpp")
    for name in names:
        if not (library / name).is_file():
            raise ValueError(f"{checkout} is no checkout of fvliang/DART: there is no {library / name}")
    folder.mkdir(parents=True, exist_ok=True)
    binding = folder / "binding.cpp"
    if not binding.is_file() or binding.read_text() != SOURCE:  # a newer file would be compiled again
        binding.write_text(SOURCE)
    theirs = ["-O3", "-std=c++20", "-fopenmp", "-DNO_NGRAM_ON_FIRST_TOKEN", "-DNGRAM_BATCH_LOAD"]
    return load(
        name="crossspec_dart_search",
        sources=[str(binding), *(str(library / name) for name in names)],
        # trie_ngram.cpp has a main() of its own, which a module cannot.
        extra_cflags=[*theirs, "-Dmain=unused_main"],
        extra_include_paths=[str(library / "inc")],
        extra_ldflags=["-fopenmp"],
        build_directory=str(folder),
    )


def level_weight(level: int) -> float:
    """As their ``tree_search_config.py``."""
    return float((level + 1) ** -0.7)


def logit_weight(level: int) -> float:
    """As their ``tree_search_config.py``."""
    return float(0.9**level)


def their_tree(module: Any, trie: Any, question: Question, sizes: Sizes, ngram_weight: float, stop: int) -> set[Tokens]:
    """The paths of the tree that their search gives, read from its tokens and its mask.

    Raises:
        AssertionError: its mask and its positions contradict each other.
    """
    searcher = module.Searcher(level_weight, logit_weight, ngram_weight, stop, sizes.beam_width, sizes.num_nodes)
    tokens, _, mask, positions = searcher.search(sizes.levels, question.tokens, question.shares, trie, question.prompt)
    found = set()
    for seen, position in list(zip(mask, positions, strict=True))[1:]:
        rows = sorted((row for row, is_seen in enumerate(seen) if is_seen and row), key=lambda row: positions[row])
        assert [positions[row] for row in rows] == list(range(1, position + 1))
        found.add(tuple(tokens[row] for row in rows))
    assert len(found) == len(tokens) - 1
    return found


# -- ties aside ----------------------------------------------------------------------------------------------------


class Exact(NamedTuple):
    """A search in float64 from exact counts.

    Attributes:
        trie: their n-grams.
        question: what is searched.
        sizes: of the search.
        ngram_weight: 0 for no n-gram term.
        stop: the stop token; negative for none.
        error: nats that a score of either implementation may be off by.
    """

    trie: Any
    question: Question
    sizes: Sizes
    ngram_weight: float
    stop: int
    error: float

    def children(self, level: int, above: dict[Tokens, float]) -> dict[Tokens, float]:
        """All candidates of a level with their scores."""
        found = {}
        tokens, shares = self.question.tokens[level], self.question.shares[level]
        for path, score in above.items():
            chances = [1.0] * len(tokens)
            if level and self.ngram_weight:
                context = [*self.question.prompt, *path]
                chances = self.trie.get_probability(context, tokens)[0]
            for token, share, chance in zip(tokens, shares, chances, strict=True):
                term = logit_weight(level) * math.log(share + EPSILON)
                if level and self.ngram_weight:
                    term += self.ngram_weight * math.log(chance + EPSILON)
                found[*path, token] = score + level_weight(level) * term
        return found

    def cut(self, scores: dict[Tokens, float], most: int) -> tuple[set[Tokens], set[Tokens]]:
        """Of a cut after the best ``most``: what is in for sure, and what may be."""
        if len(scores) <= most:
            return set(scores), set()
        last = sorted(scores.values(), reverse=True)[most - 1]
        sure = {path for path, score in scores.items() if score > last + 2 * self.error}
        near = {path for path, score in scores.items() if abs(score - last) <= 2 * self.error}
        return (sure | near, set()) if len(sure) + len(near) == most else (sure, near)

    def ways(self) -> Iterator[tuple[dict[Tokens, float], int]]:
        """Every set of all candidates that the cuts of the beams can lead to, and how many of them were open."""

        def go_on(
            level: int, beam: dict[Tokens, float], seen: dict[Tokens, float], num_open: int
        ) -> Iterator[tuple[dict[Tokens, float], int]]:
            fresh = self.children(level, beam)
            seen = seen | fresh
            if level + 1 == self.sizes.levels:
                yield seen, num_open
                return
            others = {path: score for path, score in fresh.items() if path[-1] != self.stop}
            sure, near = self.cut(others, self.sizes.beam_width)
            left = min(self.sizes.beam_width, len(others)) - len(sure)
            for chosen in combinations(sorted(near), left):
                kept = {path: fresh[path] for path in (*sure, *chosen)}
                yield from go_on(level + 1, kept, seen, num_open + bool(near))

        yield from go_on(0, {(): 0.0}, {}, 0)


def is_outcome(search: Exact, trees: list[set[Tokens]]) -> tuple[list[bool], bool]:
    """Whether trees are what Algorithm 1 gives, ties aside.

    Args:
        search: the exact one.
        trees: paths of each.

    Returns:
        For each tree, and whether a cut had to be left open for them (a tie within the error).
    """
    found, was_open = [False] * len(trees), False
    for number, (seen, num_open) in enumerate(search.ways()):
        assert number < MOST_WAYS, "too many ties to follow: take fewer candidates or a finer store"
        sure, near = search.cut(seen, search.sizes.num_nodes)
        size = min(search.sizes.num_nodes, len(seen))
        was_open = was_open or bool(num_open or near)
        for i, tree in enumerate(trees):
            found[i] = found[i] or (len(tree) == size and sure <= tree <= sure | near)
        if all(found):
            break
    return found, was_open
