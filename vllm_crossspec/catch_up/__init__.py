"""Lazy catch-up: tokens that an inactive drafter missed wait here until it is chosen (WhiFlash, section 3.4)."""
