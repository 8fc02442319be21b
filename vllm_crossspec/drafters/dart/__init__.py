"""DART: logits of all draft positions from one forward of one layer (Liu et al. 2026)."""
