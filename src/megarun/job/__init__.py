"""The inputs of a run: the plan as a job, with token files, output folder and checkpoint settings; needs no torch."""
