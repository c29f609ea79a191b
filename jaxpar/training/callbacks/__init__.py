"""What acts between the steps of a run, in one list: a user's callbacks, and everything else."""
