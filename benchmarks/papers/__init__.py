"""The tables of the five papers, made on models at hand: a module a paper, see ``paper_tables.py``."""
