"""Proposers: the drafters' side of a decoding round, on vLLM's own speculators where those serve."""
