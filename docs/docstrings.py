"""An extension of griffe, which reads the docstrings for the reference.

Griffe knows other titles than the code uses, and one name per line where the code says "a, b: their meaning". It takes
types and defaults from the signature, so those in the docstring are left out. And it does not know the names that a
package reads from its ``__init__.pyi``.
"""

import re

import griffe

TITLES = {"Example:": "Examples:", "Class attributes:": "Attributes:"}
TITLE = re.compile(rf"^({'|'.join(TITLES)})$", re.MULTILINE)
DEFAULT = re.compile(r"^(    \w+) \(.*, default .*?\):", re.MULTILINE)
NAMES = re.compile(r"^    (\w+(?:, \w+)+)(:.*(?:\n     .*)*)", re.MULTILINE)


class Form(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring:
            text = TITLE.sub(lambda m: TITLES[m[1]], DEFAULT.sub(r"\1:", obj.docstring.value))
            obj.docstring.value = NAMES.sub(lambda m: "\n".join(f"    {n}{m[2]}" for n in m[1].split(", ")), text)

    def on_package(self, *, pkg: griffe.Module, **kwargs: object) -> None:
        if pkg.exports is None:
            pkg.exports = [name for name, member in pkg.members.items() if member.is_alias and not member.runtime]
