"""Verification of draft trees: rows and masks of a step, attention among them, penalties, and the walk."""
