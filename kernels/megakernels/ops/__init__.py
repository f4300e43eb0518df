"""One folder per operation."""
