"""FlashHead: a drafter's next token from a few clusters of its output embedding instead of from all of it.

Tranheden et al. 2026 (arXiv 2603.14591), as used for drafters by Ma and Wang 2026, section 2.5: the rows of the output
embedding are clustered into groups of equal size, a hidden state is compared with the centroids, and only the tokens of
the clusters that come nearest (the probed ones) are scored.

Shape legend of the room: V tokens of the vocabulary, D hidden size, C clusters, M tokens of a cluster (V = C * M),
B rows of hidden states, P probed clusters of a row, S special tokens, which are candidates of every row,
N = P * M + S candidates of a row, K best ones that are asked for.
"""
