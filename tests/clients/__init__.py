"""Converted models in other people's training stacks, each test where that stack is installed: `make
test-clients`."""
