"""Lazy catch-up: what inactive drafters miss waits here until they are chosen (WhiFlash, section 3.4)."""
