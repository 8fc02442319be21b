"""Routing: which drafter drafts for a request in a round."""
