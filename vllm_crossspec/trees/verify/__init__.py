"""Verification of draft trees: rows and masks of a step, their attention, penalties, and the walk."""
