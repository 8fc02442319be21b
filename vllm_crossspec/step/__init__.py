"""One step of the runner, and the seats of features in it."""
