"""Converted models in other people's training stacks, each in the module that its configuration names."""
