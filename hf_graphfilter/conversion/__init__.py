"""Converting pretrained models to filters in the place of attention, with linear time, and measuring what it costs."""

from .call import Rates, convert
from .data import text_batches
from .report import ConversionReport
from .speed import Speed, crossover, speed

__all__ = ["ConversionReport", "Rates", "Speed", "convert", "crossover", "speed", "text_batches"]
