"""N-gram statistics for drafting (DART, section 4.2): a compact store, its builder, its importer and its lookups."""
