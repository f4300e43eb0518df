"""The command line: one file per command. A command returns its exit status; only `main` exits the process."""

import os

# pydantic would search every installed distribution for plugins, which takes longer than an estimate; megaplan uses none.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")
