"""The processes of a run, and the work of each."""
