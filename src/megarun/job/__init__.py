"""What a run trains: the plan as a job, with its tokens, folder and checkpoint settings; needs no torch."""
