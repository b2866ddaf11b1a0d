"""Parts of one or two entries."""
