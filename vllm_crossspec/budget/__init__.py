"""The draft nodes of a whole batch that are worth a row of the target's step."""
