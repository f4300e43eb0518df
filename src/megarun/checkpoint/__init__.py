"""Checkpoints: a run's whole state in a layout that no plan owns, written atomically and read under any plan of the same model."""
