"""All that depends on vLLM's version."""
