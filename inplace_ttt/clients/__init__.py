"""Integrations with other training frameworks, each in the module that its configuration names."""
