"""N-grams counted by a plain dictionary, what the reference makes of them, and `.trie` files written from them."""

import collections
import math
import struct

import numpy as np

FLOOR = math.log(1e-10)


def random_tokens(seed, size=1500, vocab_size=40):
    """Skewed token ids with -1 between documents."""
    rng = np.random.default_rng(seed)
    ids = np.minimum(rng.zipf(1.4, size) - 1, vocab_size - 1)
    ids[rng.random(size) < 0.02] = -1
    return ids


def count(ids, order):
    """How often each n-gram of 1 .. order tokens occurs within a document."""
    counts = collections.Counter()
    ids = [int(i) for i in ids]
    for start in range(len(ids)):
        for length in range(1, order + 1):
            ngram = tuple(ids[start : start + length])
            if len(ngram) < length or min(ngram) < 0:
                break
            counts[ngram] += 1
    return counts


def expected(counts, context, candidate, backoff=None):
    """ln p and the matched length, by the rule in words."""
    context = [int(token) for token in context]
    while context and min(context) < 0:
        context = context[1:]
    total = sum(n for ngram, n in counts.items() if len(ngram) == 1)
    for length in range(len(context), -1 if backoff else 0, -1):
        before = tuple(context[len(context) - length :])
        if (*before, candidate) in counts:
            p = counts[*before, candidate] / (counts[before] if before else total)
            return math.log(p) + (len(context) - length) * math.log(backoff or 1), length
    return FLOOR, 0


def write_trie(path, counts, order, seed=0):
    """A `.trie`, its nodes after the root in random order as far as parents allow, children in random order."""
    rng = np.random.default_rng(seed)
    ngrams = [(), *sorted(counts, key=lambda ngram: (len(ngram), rng.random()))]
    number = {ngram: i for i, ngram in enumerate(ngrams)}
    children = collections.defaultdict(list)
    for ngram in ngrams[1:]:
        children[ngram[:-1]].append(ngram)
    with open(path, "wb") as file:
        file.write(struct.pack("=QQ", order, len(ngrams)))
        for ngram in ngrams:
            token, parent = (ngram[-1], number[ngram[:-1]]) if ngram else (0, 0)
            freq = counts[ngram] if ngram else sum(n for key, n in counts.items() if len(key) == 1)
            file.write(struct.pack("=iQiQ", token, parent, freq, len(children[ngram])))
            rng.shuffle(children[ngram])
            for child in children[ngram]:
                file.write(struct.pack("=iQ", child[-1], number[tuple(child)]))
