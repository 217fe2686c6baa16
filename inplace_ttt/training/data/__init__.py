"""Turns documents into rows of tokens."""
