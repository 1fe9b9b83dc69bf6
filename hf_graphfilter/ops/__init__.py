"""Kernels: fast forms of what the shift operator defines; each is checked against the plain form in the tests."""
