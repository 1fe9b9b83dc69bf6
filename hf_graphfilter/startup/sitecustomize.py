"""Import the package in every Python process that ``hf-graphfilter run`` starts, directly or indirectly.

``run`` puts this folder on PYTHONPATH, and Python imports the first ``sitecustomize`` on its path when it starts. This
file removes its folder from the path, and then imports the ``sitecustomize`` that it hides, if there is one.
"""

import os
import sys

sys.path.remove(os.path.dirname(__file__))
_this_module = sys.modules.pop(__name__)

try:
    import hf_graphfilter  # noqa: F401
except ModuleNotFoundError as error:  # a Python of another environment: there, patched checkpoints do not load
    if error.name != "hf_graphfilter":
        raise
finally:  # the user's own runs also where the package cannot be imported
    try:
        import sitecustomize  # noqa: F401
    except ModuleNotFoundError as error:
        sys.modules[__name__] = _this_module  # so that Python finds this file as the module that it imports
        if error.name != __name__:
            raise
