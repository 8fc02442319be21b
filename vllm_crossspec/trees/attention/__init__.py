"""Attention over draft trees: vLLM's backends, plus a tail of rows per request that see only their ancestors."""
