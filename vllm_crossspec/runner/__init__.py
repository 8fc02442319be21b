"""The model runner, the features that take part in its steps, and the verifier."""
