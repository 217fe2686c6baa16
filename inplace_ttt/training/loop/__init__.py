"""The steps of a run: the Trainer, its guards, its log, its checkpoints."""
