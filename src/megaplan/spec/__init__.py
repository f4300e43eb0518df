"""The spec: the user's input, validated, with diagnostics that point into the file."""
