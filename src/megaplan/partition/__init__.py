"""The split of the stack into pipeline stages, and a certificate of how good the cuts are."""
