"""Attention over draft trees: vLLM's own backends, with one tail of rows per request that see only their ancestors."""
