"""``python -m hf_graphfilter``: the command ``hf-graphfilter``."""

from .cli import main

if __name__ == "__main__":
    main()
