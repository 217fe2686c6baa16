"""Reads input files, and writes output files and folders in one step."""
