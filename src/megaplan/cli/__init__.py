"""The command line: one file per command. A command returns its exit status; only `main` exits the process."""

import gc
import os

# pydantic would search every installed distribution for plugins, which takes longer than an estimate; megaplan uses none.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")
# What imports and models make lives as long as the process: looking for garbage among it takes longer than it frees.
gc.set_threshold(200_000, 20, 20)
