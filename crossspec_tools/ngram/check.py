"""Whether every node of an n-gram store means something; engines check what they read."""

import torch

from vllm_crossspec.ngram_store.store import MAX_CODES, NgramStore


def check_contents(store: NgramStore, where: str, chunk: int = 1 << 20) -> None:
    """Read all of a store and check every node. Raises ValueError where one is wrong."""
    header, begin = store.header, 0
    next_sizes = (*header.level_sizes[1:], 0)
    for size, next_size, most in zip(header.level_sizes, next_sizes, (*header.max_children, None), strict=True):
        end = begin + size
        if most is not None and int(store.offsets[end]) != end + next_size:
            raise ValueError(f"{where}: a level ends in the wrong place: write or copy the file again")
        for start in range(begin, end, chunk):
            stop = min(start + chunk, end)
            codes = store.codes[start:stop]
            known = (codes >= 0) & (codes <= MAX_CODES[header.bits])
            if not (known | (codes == header.none_code)).all():
                raise ValueError(f"{where}: a probability has no meaning: write or copy the file again")
            if most is not None:
                _check_children(store, start, stop, most, where)
        begin = end


def _check_children(store: NgramStore, start: int, stop: int, most: int, where: str) -> None:
    """The children of these nodes: how many, in which order, known to the vocabulary."""
    offsets = store.offsets[start : stop + 1].long()
    counts = offsets[1:] - offsets[:-1]
    if int(counts.min()) < 0 or int(counts.max()) > most or int(offsets[-1]) > store.header.total:
        raise ValueError(f"{where}: a node's children are not where they can be: write or copy the file again")
    first_node = int(offsets[0])
    begin, end = first_node - store.header.vocab_size, int(offsets[-1]) - store.header.vocab_size
    tokens = store.tokens[begin:end]
    eldest = torch.zeros(len(tokens) + 1, dtype=torch.bool)
    eldest[offsets[:-1] - first_node] = True  # of a childless node: where the next one's begin
    is_known = (tokens >= 0) & (tokens < store.header.vocab_size)
    if not is_known.all() or not ((tokens[1:] > tokens[:-1]) | eldest[1 : len(tokens)]).all():
        raise ValueError(f"{where}: the tokens of its nodes are out of order: write or copy the file again")
