"""Kernels: fast forms of what the shift operator defines. The tests check each against the direct form."""
