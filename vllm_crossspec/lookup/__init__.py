"""Drafts that are found in text at hand: where a request's last tokens stood before, and what followed them there."""
