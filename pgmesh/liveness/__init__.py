"""Knowledge of the other ranks, whether they live and what each does: heartbeats and statuses in the world's store."""
