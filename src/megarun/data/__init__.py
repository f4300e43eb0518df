"""Tokens: text to token files, the rows of a rank's batches, and which batches a run has used."""
