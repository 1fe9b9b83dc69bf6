"""The former name of source_code.py, which it runs. Imported as ``code``, it gives way to Python's own module."""

import sys

import recipes

if __name__ == "__main__":
    recipes.check_extras("recipes")
    from recipes import runs, source_code

    print("recipes/code.py is called recipes/source_code.py now", file=sys.stderr)
    runs.main(source_code.RECIPE)
elif __name__ == "code":
    del sys.modules["code"]
    import code  # noqa: F401
