"""What a verified step leaves behind: the accepted path's KV and rows, moved to where a chain's would be."""
