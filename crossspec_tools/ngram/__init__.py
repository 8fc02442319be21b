"""Building, checking and importing of n-gram stores, and `crossspec ngram`."""
