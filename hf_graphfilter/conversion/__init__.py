"""Converting pretrained models to filters in the place of attention, with linear time, and measuring what it costs."""

from .call import Rates, convert
from .data import text_batches
from .report import ConversionReport

__all__ = ["ConversionReport", "Rates", "convert", "text_batches"]
