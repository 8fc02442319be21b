"""ConFu's contemplate tokens: where their rows lie, what goes into them and what is read out of them."""
