"""The command line: one file a command. A command returns its exit status; `main` alone ends the process."""
