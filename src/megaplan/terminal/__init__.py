"""What the command lines of megaplan and megarun share: answers on stdout, diagnostics on stderr, JSON documents and plain-text tables."""
