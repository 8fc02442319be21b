"""Drafters that vLLM has no model of."""
