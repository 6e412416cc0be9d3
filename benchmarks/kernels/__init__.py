"""Benchmarks of the kernels beside rival kernels."""
