"""FlashHead: a drafter's next token from a few clusters of its output embedding instead of from all of it.

The method is by Tranheden et al. 2026 (arXiv 2603.14591); Ma and Wang 2026, section 2.5, use it for drafters. The rows
of the output embedding are clustered into groups of equal size. A hidden state is compared with the centroids, and only
the tokens of the nearest (*probed*) clusters are scored.

Shape legend of this folder: V tokens of the vocabulary, D hidden size, C clusters, M tokens of a cluster (V = C * M),
B rows of hidden states, P probed clusters of a row, S special tokens, which are candidates of every row,
N = P * M + S candidates of a row, K best candidates that are returned.
"""
