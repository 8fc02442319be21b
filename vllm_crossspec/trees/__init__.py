"""Draft trees: building, verification in one pass, commit, and the attention and state for them."""
