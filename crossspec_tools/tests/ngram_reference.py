"""The n-gram trie of DART's authors, compiled from a checkout of theirs, as a module of Python.

Their `trie_ngram.cpp` and `buffered_file_reader.cpp` are compiled as they stand, with their flags, and a loop of ours
around `get_probability`, so that its time has no Python in it. Nothing of theirs is part of this repository.
"""

from pathlib import Path
from typing import Any

SOURCE = r"""
#include <torch/extension.h>
#include <pybind11/stl.h>
#include <chrono>
#include <tuple>
#include <vector>
#include "ngram.h"

// Contexts [M, K] and candidates [M, C], int32; what get_probability says, and the seconds that all calls took.
static std::tuple<at::Tensor, at::Tensor, double> look_up(
    const ngram::TrieNgram& trie, at::Tensor contexts, at::Tensor candidates) {
  const int64_t rows = contexts.size(0), width = contexts.size(1), count = candidates.size(1);
  std::vector<std::vector<token_t>> before, asked;
  for (int64_t i = 0; i < rows; ++i) {
    auto* first = contexts.data_ptr<int32_t>() + i * width;
    before.emplace_back();
    for (int64_t j = 0; j < width; ++j) if (first[j] >= 0) before.back().push_back(first[j]);
    auto* wanted = candidates.data_ptr<int32_t>() + i * count;
    asked.emplace_back(wanted, wanted + count);
  }
  auto probabilities = at::empty({rows, count}, at::kFloat), matched = at::empty({rows, count}, at::kInt);
  std::vector<std::pair<std::vector<prob_t>, std::vector<size_t>>> answers(rows);
  auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < rows; ++i) answers[i] = trie.get_probability(before[i], asked[i]);
  double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  for (int64_t i = 0; i < rows; ++i) for (int64_t j = 0; j < count; ++j) {
    probabilities.data_ptr<float>()[i * count + j] = answers[i].first[j];
    matched.data_ptr<int32_t>()[i * count + j] = (int32_t)answers[i].second[j];
  }
  return {probabilities, matched, seconds};
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using ngram::TrieNgram;
  pybind11::class_<TrieNgram>(m, "TrieNgram")
      .def(pybind11::init<size_t>(), pybind11::arg("order"))
      .def("add_tokens", [](TrieNgram& self, at::Tensor ids) {
        std::vector<token_t> document;
        for (int64_t i = 0; i < ids.size(0); ++i) {
          token_t id = ids.data_ptr<int32_t>()[i];
          if (id >= 0) { document.push_back(id); continue; }
          self.add_conversation(document);
          document.clear();
        }
        self.add_conversation(document);
      })
      .def("save", &TrieNgram::save)
      .def("reduce", &TrieNgram::reduce)
      .def_static("load", &TrieNgram::load);
  m.def("look_up", &look_up);
}
"""


def load_reference(checkout: Path, folder: Path) -> Any:
    """Compile and import their trie.

    Args:
        checkout: of https://github.com/fvliang/DART.
        folder: that build files go to; nothing is written into the checkout.

    Returns:
        a module with ``TrieNgram`` (``add_tokens``, ``save``, ``load``, ``reduce``) and ``look_up``.

    Raises:
        ValueError: the folder is no such checkout.
    """
    from torch.utils.cpp_extension import load

    library = checkout.resolve() / "dart" / "tree_search" / "cpplib"
    sources = [library / "cpp_ngram" / "trie_ngram.cpp", library / "cpp_utils" / "buffered_file_reader.cpp"]
    if not all(path.is_file() for path in sources):
        raise ValueError(f"{checkout} is no checkout of fvliang/DART: there is no {sources[0]}")
    folder.mkdir(parents=True, exist_ok=True)
    binding = folder / "binding.cpp"
    binding.write_text(SOURCE)
    return load(
        name="crossspec_dart_ngram",
        sources=[str(binding), *map(str, sources)],
        # Their file has a main() of its own, which a module cannot.
        extra_cflags=["-O3", "-std=c++20", "-fopenmp", "-DNGRAM_BATCH_LOAD", "-Dmain=unused_main"],
        extra_include_paths=[str(library / "inc")],
        extra_ldflags=["-fopenmp"],
        build_directory=str(folder),
    )
