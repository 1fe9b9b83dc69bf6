"""Fixtures. Warnings are errors, those that transformers logs too."""

import logging
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # recipes
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import transformers
from transformers.utils import logging as transformers_logging

torch.set_num_threads(1)  # the tests run in parallel processes
transformers_logging.disable_progress_bar()


class _Records(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


@pytest.fixture(autouse=True)
def transformers_warnings():
    """The warnings that transformers logged; a test that expects some empties the list."""
    handler = _Records()
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield handler.messages
    logger.removeHandler(handler)
    assert not handler.messages, handler.messages


@pytest.fixture(autouse=True)
def seed():
    transformers.set_seed(0)
