"""What a converted model remembers: tasks, and comparisons with TTT on and off."""
