"""Fixtures. Warnings are errors, also warnings that transformers logs."""

import gc
import logging
import os
import random
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # recipes
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy
import pytest
import torch
from compatibility import Collector, described
from durations import FILE as LONG_TESTS
from transformers.utils import logging as transformers_logging

import hf_graphfilter.logs  # noqa: F401  # else its logger has another parent until a test imports it
from hf_graphfilter import GraphFilterError
from hf_graphfilter.filters.core.registry import CONFIG_CLASSES

gc.disable()  # while tests are collected: the search for garbage took an eighth of the suite's time
torch.set_num_threads(int(os.environ.get("TEST_THREADS", "1")))  # one: the tests run in parallel processes
transformers_logging.disable_progress_bar()


def pytest_addoption(parser):
    parser.addoption("--outcomes", type=Path, help="a JSON file for what the tests marked `feature` show")


def pytest_configure(config):
    file = config.getoption("--outcomes")
    if file and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Collector(file))


def pytest_collection_modifyitems(items):
    """Mark the tests that ``tests/durations.py`` found to be long."""
    long = {*LONG_TESTS.read_text().split()}
    for item in items:
        if item.nodeid.partition("[")[0] in long:
            item.add_marker("long")


def pytest_collection_finish():
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


def pytest_unconfigure():
    gc.unfreeze()


SHORT_TEXTS = "a linearized model is hardly faster"  # logged for all models of the tests; test_conversion.py checks it


class _Records(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        if SHORT_TEXTS not in record.getMessage():
            self.messages.append(record.getMessage())


@pytest.fixture(autouse=True)
def transformers_warnings():
    """The warnings that transformers and this package logged; a test that expects some empties the list."""
    handler = _Records()
    logger = transformers_logging.get_logger()  # the parent of this package's
    logger.addHandler(handler)
    yield handler.messages
    logger.removeHandler(handler)
    assert not handler.messages, handler.messages


@pytest.fixture
def ctrl_c():
    """Restore Python's handler of Ctrl-C, whatever runs the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def registry():
    """Filters that a test registers are forgotten after it."""
    before = dict(CONFIG_CLASSES)
    yield
    CONFIG_CLASSES.clear()
    CONFIG_CLASSES.update(before)


@pytest.fixture(autouse=True)
def seed():
    """Seed as ``transformers.set_seed``, but without its deferred call for a GPU, which would keep the stack alive."""
    random.seed(0)
    numpy.random.seed(0)
    (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(0)


@pytest.fixture(autouse=True)
def feature(request, record_property):
    """Record which feature a marked test shows, for docs/compatibility.md."""
    for name, value in described(request.node).items():
        record_property(name, value)


@pytest.fixture
def refuses(record_property):
    """``pytest.raises`` for what the package (or transformers) refuses; docs/compatibility.md quotes it."""

    @contextmanager
    def refused(match, error=GraphFilterError):
        with pytest.raises(error, match=match) as caught:
            yield
        record_property("refused", str(caught.value))

    return refused
