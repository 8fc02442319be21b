"""Models of larger shapes that compute what a small one computes. Speed is measured with them."""
