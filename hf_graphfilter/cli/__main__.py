"""``python -m hf_graphfilter.cli``."""

from . import main

if __name__ == "__main__":
    main()
