"""N-gram statistics for drafting (Liu et al. 2026, section 4.2): a compact store, and lookups in it."""

NO_STORE = "there is no such file; `crossspec ngram build` or `import` writes one"
