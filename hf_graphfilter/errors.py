"""The one exception of the package."""


class GraphFilterError(ValueError):
    """Raised for every mistake that the package can name: what was asked, what was found, what to do.

    It is also a ``ValueError``. A call that raises it leaves the model as it was.
    """
