"""Whole models, which ``import hf_graphfilter`` registers with the Auto classes of transformers."""
