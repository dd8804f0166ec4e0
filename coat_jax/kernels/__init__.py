"""Pallas kernels of single operations, each beside the reference that defines it."""
