"""The tasks of sequences: each official format on a small sample of it, parts and folds, and what cannot be read."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from recipes.sequence_tasks import load, read

DATA = Path(__file__).parents[2] / "shared" / "data"
with_data = pytest.mark.skipif(not DATA.is_dir(), reason="shared data is absent")


@pytest.fixture(autouse=True)
def nothing_kept():
    """Tests write several samples to one place."""
    yield
    read.cache_clear()


def write(folder, files):
    """Files by their paths; lines as a list."""
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Image.Image):
            content.save(file)
        elif isinstance(content, bytes):
            file.write_bytes(content)
        else:
            file.write_text(content if isinstance(content, str) else "".join(f"{line}\n" for line in content))
    return folder


def grey(value, side=32):
    return Image.fromarray(np.full((side, side), value, dtype=np.uint8))


def documents(count=12):
    """Cats and dogs, as many of both."""
    return {f"{c}s/{n:02}.txt": f"Number {n} is a {c}." for n in range(count) for c in ("cat", "dog")}


HEADER = [
    "#comment",
    "@problemName X",
    "@timeStamps false",
    "@univariate false",
    "@dimensions 2",
    "@classLabel true a B",
]


def ts(*rows, header=HEADER):
    return [*header, "@data", *rows]


SERIES = ["1,2,3:4,5,6:a", "1.5,-2e1:3,4:b", "7:8:a", "0,0:1,1:b"]
LISTOPS = ["( ( ( [MAX 2 ) 9 ) ] )\t9", "( ( [MIN ( ( ( [SM 5 ) 6 ) ] ) ) ] )\t1"]
SAMPLES = {
    "bbc": documents(),
    "imdb": {f"aclImdb/{part}/{name}": text for part in ("train", "test") for name, text in documents(2).items()}
    | {"aclImdb/train/unsup/0.txt": "no label"},
    "JapaneseVowels": {
        "JapaneseVowels_TRAIN.ts": ts(*SERIES),
        "JapaneseVowels_TEST.ts": ts("1,2:3,4:A"),
    },
    "listops": {f"listops-1000/basic_{part}.tsv": ["Source\tTarget", *LISTOPS] for part in ("train", "val", "test")},
    "listops-short": {"listops/test_d20s.tsv": [f"{n % 10}\t( ( [MAX {n % 10} ) ] )" for n in range(100)]},
    "image": {
        f"{part}/{name}/{n}.png": grey(9 * n) for part in ("train", "test") for name in ("cat", "dog") for n in range(2)
    },
}


@pytest.mark.parametrize(
    ("task", "sizes", "first"),
    [
        ("bbc", (12, 4, 8), None),
        ("JapaneseVowels", (4, 1), {"series": [[1, 4], [2, 5], [3, 6]], "label": 0}),
        ("listops", (2, 2, 2), {"text_a": "[MAX 2 9 ]", "label": 9}),
        ("listops-short", (70, 10, 20), None),
        ("image", (4, 4), {"input_ids": [0] * 1024, "label": 0}),
    ],
)
def test_official_formats_are_read(task, sizes, first, tmp_path):
    loaded = load(task, str(write(tmp_path, SAMPLES[task])), "auto" if len(sizes) == 3 else "none")
    assert tuple(map(len, loaded.parts.values())) == sizes
    assert all({*part["label"]} <= {*range(len(loaded.labels))} for part in loaded.parts.values())
    if first:
        assert first in loaded.parts["train"].to_list()
