"""The probes. Each runs the module, and decides one item from its outputs."""
