"""Converting pretrained models to filters in the place of attention, with linear time, and measuring what it costs."""

from .call import Rates, convert
from .card import load_conversion, save_conversion
from .data import text_batches
from .report import ConversionReport
from .speed import Speed, crossover, decoding_speed, speed

__all__ = [
    "ConversionReport",
    "Rates",
    "Speed",
    "convert",
    "crossover",
    "decoding_speed",
    "load_conversion",
    "save_conversion",
    "speed",
    "text_batches",
]
