"""One draft round of our proposers beside one of the papers' own code (see docs/results/parity.md)."""
