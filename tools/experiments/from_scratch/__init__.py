"""The memories against each other: small causal models from scratch, matched in parameters, tokens and data
order."""
