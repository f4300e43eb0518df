"""Plan files: the document, its canonical text, reading with every check, making one, and comparing two."""
