"""Triton kernels of normalization layers, and the operators that call them."""
