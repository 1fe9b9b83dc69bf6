"""Run the command ``hf-graphfilter`` as ``python -m hf_graphfilter``."""

from .cli import main

if __name__ == "__main__":
    main()
