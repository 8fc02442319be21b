"""How contemplate rows lie among the rows that the target verifies of a request (Qin et al. 2026, figure 3).

Row 0 is the root, the last sampled token; rows 1 to n are the draft nodes; row n + 1 + a is the contemplate row of row
a. To vLLM's scheduler all rows but the root are draft tokens, so that n nodes are 2 n + 1 of them. The scheduler may
cut the last ones off; what is left is read the same way, with fewer nodes, each with its contemplate row.
"""


def planned_tokens(num_nodes: int, contemplates: bool) -> int:
    """Draft tokens that the scheduler plans for so many draft nodes of a request."""
    return 2 * num_nodes + 1 if contemplates and num_nodes else num_nodes


def verified_nodes(num_tokens: int, contemplates: bool) -> int:
    """Draft nodes among so many draft tokens of the scheduler's."""
    return max(num_tokens - 1, 0) // 2 if contemplates else num_tokens
