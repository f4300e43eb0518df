"""Checkpoints: a run's complete state, independent of the plan's layout, written atomically and read under any plan of the same model."""
