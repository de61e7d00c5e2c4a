"""Triton kernels, one module per operator; a function takes its op's arguments in the order of ops/schemas.py."""
