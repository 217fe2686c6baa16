"""A run: its processes, and what each one does."""
