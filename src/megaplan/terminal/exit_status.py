"""Exit statuses that every command of megaplan and megarun uses; a command's own (1 "no", 3 "a condition holds") are in its module."""

ERROR = 2
"""The command failed; diagnostics say why."""
SIGNAL_STATUS = 128
"""Base of a shell's status for a process that a signal ended; the signal's number is added."""
INTERRUPTED = SIGNAL_STATUS + 2
"""SIGINT."""
BROKEN_PIPE = SIGNAL_STATUS + 13
"""SIGPIPE: the reader of the output has closed it."""
