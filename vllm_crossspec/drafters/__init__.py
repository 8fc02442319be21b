"""The drafters: a folder each, with its checkpoint reader, proposer, model and kernels."""
