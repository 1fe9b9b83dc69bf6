"""Imports the package in every Python process that ``hf-graphfilter run`` starts, directly or not.

``run`` puts this folder on PYTHONPATH, and Python imports the first ``sitecustomize`` of its path when it starts. This
one takes its folder off the path again and hands over to the one that it hides.
"""

import os
import sys

sys.path.remove(os.path.dirname(__file__))
_own = sys.modules.pop(__name__)

try:
    import hf_graphfilter  # noqa: F401
except ModuleNotFoundError as error:  # a Python of another environment: there, patched checkpoints do not load
    if error.name != "hf_graphfilter":
        raise

try:
    import sitecustomize  # noqa: F401
except ModuleNotFoundError as error:
    sys.modules[__name__] = _own  # the import of this file is to find it
    if error.name != __name__:
        raise
