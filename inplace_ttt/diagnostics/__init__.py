"""What writes and gradients do, measured; and what is wrong with them, found by ablation."""
