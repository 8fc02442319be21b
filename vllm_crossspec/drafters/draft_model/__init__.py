"""A small language model that drafts on its own: it reads the text and no states of the target."""
