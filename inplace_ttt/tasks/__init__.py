"""Tasks that a memory can be trained and judged on: data in, no model."""
