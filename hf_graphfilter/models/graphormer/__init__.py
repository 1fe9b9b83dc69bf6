"""Graphormer: a Transformer on graphs, whose attention carries a learned bias per pair of nodes."""
