"""Models of larger shapes that compute what a small one computes; folders of them are made in ``inflate``."""
