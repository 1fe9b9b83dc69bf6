"""Converter: an encoder of learned unitary filters, without attention."""
