"""Start of a job's processes, their process group, interrupts, and their exit when one of them fails."""
