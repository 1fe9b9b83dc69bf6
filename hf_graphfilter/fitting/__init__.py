"""Fitting filters to the attention that they replace: attention transfer, and the linearization of whole models."""

from .data import text_batches
from .head_choice import choose_heads
from .linearization import convert, linearize
from .report import ConversionReport
from .run import Rates
from .saved_report import load_conversion, save_conversion
from .speed import Speed, crossover, decoding_speed, speed
from .transfer import transfer_attention
from .transfer_report import TransferReport

__all__ = [
    "ConversionReport",
    "Rates",
    "Speed",
    "TransferReport",
    "choose_heads",
    "convert",
    "crossover",
    "decoding_speed",
    "linearize",
    "load_conversion",
    "save_conversion",
    "speed",
    "text_batches",
    "transfer_attention",
]
