"""The forward pass as a composition of operators."""
