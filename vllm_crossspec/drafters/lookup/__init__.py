"""Drafts copied from existing text: the tokens that followed earlier occurrences of a request's last tokens."""
