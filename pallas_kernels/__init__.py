"""Pallas kernels: arrays in, arrays out."""
