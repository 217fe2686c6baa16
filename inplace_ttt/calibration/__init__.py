"""What the extensions need to know of a model, measured on a text."""
