"""From our speculative config to vLLM's: built, resolved, scheduled, refused; nothing heavy is loaded."""
