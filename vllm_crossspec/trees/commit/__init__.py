"""Commit of a verified step: the accepted path's KV and rows move to where an accepted chain's would be."""
