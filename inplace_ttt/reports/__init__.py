"""What reports share: means with their errors."""
