"""The command line: one file a command. A command returns its exit status; `main` alone ends the process."""

import os

# pydantic would look through every installed distribution for plugins, which takes longer than an estimate, and megaplan uses none.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")
