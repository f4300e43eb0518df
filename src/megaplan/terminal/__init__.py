"""Functions that the command lines of megaplan and megarun share: answers on stdout, diagnostics on stderr, JSON documents, text tables."""
