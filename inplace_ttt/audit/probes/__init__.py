"""The probes: each runs the module and decides one item from its outputs."""
