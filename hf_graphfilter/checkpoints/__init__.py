"""Saving and loading: whole checkpoints per library, the filter alone, and the model card."""
