"""Files a command reads and folders it writes."""
