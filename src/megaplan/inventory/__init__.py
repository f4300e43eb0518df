"""The parameter ledger: every tensor of every block family, one file a family."""
