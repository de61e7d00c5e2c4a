"""Triton kernels, one module per operator."""
