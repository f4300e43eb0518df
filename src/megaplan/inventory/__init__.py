"""The parameter ledger: every tensor of every block family, one file per family."""
