"""The steps of a run: the Trainer, its guards, its log and its checkpoints."""
