"""Trees sized by request and round, from what the drafter knows of its own uncertainty."""
