"""From our speculative config to vLLM's: built, resolved, refused; nothing heavy is loaded."""
