"""The command line: one file per command. A command returns its exit status; only `main` exits the process."""

import gc
import os

# pydantic would search every installed distribution for plugins, which takes longer than an estimate; megaplan uses none.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")
# Objects of imports and models live as long as the process; collecting garbage among them costs more than it frees.
gc.set_threshold(200_000, 20, 20)
