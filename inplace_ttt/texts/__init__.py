"""Documents: finding them, opening them in any format, reading them as token ids."""
