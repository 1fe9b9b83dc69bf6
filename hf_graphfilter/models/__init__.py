"""Whole models, which ``import hf_graphfilter`` registers with the auto classes of transformers."""
