"""What writes and gradients do, measured."""
