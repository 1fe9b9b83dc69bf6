"""An extension of griffe, which reads docstrings for the reference: it knows "Examples:" and one name a line, where the
code says "Example:" and "a, b: their meaning"."""

import re

import griffe

NAMES = re.compile(r"^    (\w+(?:, \w+)+)(:.*(?:\n     .*)*)", re.MULTILINE)


class Form(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring:
            text = re.sub("^Example:", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = NAMES.sub(lambda m: "\n".join(f"    {n}{m[2]}" for n in m[1].split(", ")), text)
