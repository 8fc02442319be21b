"""The one speculator that vLLM sees: of one drafter, of several under a router, or one that records."""
