"""Sample-and-match in the place of vLLM's rejection sampler."""
