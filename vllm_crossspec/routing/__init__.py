"""Routing: choosing the drafter of each request in each round."""
