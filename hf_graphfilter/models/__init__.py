"""Whole models. ``import hf_graphfilter`` registers them with the Auto classes of transformers, once these are there."""
