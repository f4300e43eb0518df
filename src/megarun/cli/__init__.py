"""The command line: `megarun train`, `trace`, `data` and `checkpoint`, from arguments to an exit status."""
