"""Output layers of drafters. None of them ever serves the target."""
