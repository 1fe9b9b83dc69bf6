"""A league of filters: `compare.py league`."""
