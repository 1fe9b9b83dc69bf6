"""Measurements of what attention and filters do in a model.

These are over-smoothing, frequency responses, ranks, attention maps and the share of each part of a filter. ``report``
puts them on a page, ``comparison`` compares runs, and ``plots`` draws coefficients.
"""

from .branches import Branch, branch_report
from .maps import Correlation, attention_correlation, attention_maps, rollout
from .response import FrequencyResponse, frequency_response, response_curves
from .smoothing import Smoothing, smoothing
from .spectrum import Spectrum, spectrum
from .taylor import TaylorError, taylor_error

__all__ = [
    "Branch",
    "Correlation",
    "FrequencyResponse",
    "Smoothing",
    "Spectrum",
    "TaylorError",
    "attention_correlation",
    "attention_maps",
    "branch_report",
    "frequency_response",
    "response_curves",
    "rollout",
    "smoothing",
    "spectrum",
    "taylor_error",
]
