"""The speculators that vLLM calls: of one drafter, of several under a router, or for recording."""
