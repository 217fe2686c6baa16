"""Relations between invented entities, each in many wordings, for training rows that teach facts."""
