"""The earlier name of ``hf_graphfilter.patching.status``."""

from .patching.status import *  # noqa: F403
