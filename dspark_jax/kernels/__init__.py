"""Pallas kernels, one op a file: its reference, kernels, gradients and sharding."""
