"""How processes of a job start, join their process group, are interrupted, and exit when one of them fails."""
