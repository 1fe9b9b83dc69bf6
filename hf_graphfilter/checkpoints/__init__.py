"""Saving and loading: whole checkpoints by library, the filter alone, and the card beside them."""
