"""What a kind of drafter and a kind of tree is, and what its checkpoints have."""
