"""Shared parts of reports: pages from templates, charts, and means with their errors."""
