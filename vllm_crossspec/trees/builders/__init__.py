"""Builders that make draft trees of a drafter's candidates. They do not import vLLM."""
