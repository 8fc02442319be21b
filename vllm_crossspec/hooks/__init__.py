"""Our parts inside vLLM: replaced methods, and classes that extend its own."""
