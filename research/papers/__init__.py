"""The tables of the five papers, made on models that you have: a module a paper, see ``paper_tables.py``."""
