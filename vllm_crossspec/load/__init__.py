"""What is measured before the first request."""
