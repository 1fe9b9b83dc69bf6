"""Series of the UEA archive, from its .ts files.

The reader is our own: aeon's would bring numba, 150 MB, and older versions of numpy and pandas.
"""

import shutil
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
from datasets import Dataset, DatasetDict
from huggingface_hub import constants

from hf_graphfilter import GraphFilterError
from recipes.errors import line as one_line
from recipes.files import first_file
from recipes.sequence_tasks.task import Loaded, Task

ARCHIVE = "https://timeseriesclassification.com/aeon-toolkit"
NAMES = (  # of Table 9 of the AGF paper, and a small one
    "EthanolConcentration",
    "FaceDetection",
    "Handwriting",
    "Heartbeat",
    "JapaneseVowels",
    "PEMS-SF",
    "SelfRegulationSCP1",
    "SelfRegulationSCP2",
    "SpokenArabicDigits",
    "UWaveGestureLibrary",
    "BasicMotions",
)
FILES = {"train": "TRAIN", "test": "TEST"}


def series(root: Path | None, task: Task) -> Loaded:
    """NAME_TRAIN.ts and NAME_TEST.ts of a folder, or of the archive."""
    root = download(task.folder) if root is None else root
    files = [first_file(root, [f"{task.folder}_{part}.ts"]) for part in FILES.values()]
    parts, labels, channels = {}, (), None
    for part, file in zip(FILES, files, strict=True):
        rows = Rows(file, labels, channels)
        parts[part], labels, channels = rows.table(), rows.labels, rows.channels
    return Loaded(DatasetDict(parts), labels)


def download(name: str) -> Path:
    """Return the folder of the archive's files, which are fetched once."""
    folder = Path(constants.HF_HOME, "hf_graphfilter", "uea", name)
    names = [f"{name}_{part}.ts" for part in FILES.values()]
    if all((folder / file).is_file() for file in names):
        return folder
    address = f"{ARCHIVE}/{name}.zip"
    try:
        if constants.HF_HUB_OFFLINE:
            raise OSError("HF_HUB_OFFLINE is set")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            with urllib.request.urlopen(address, timeout=60) as source, Path(temporary, "zip").open("wb") as target:
                shutil.copyfileobj(source, target)
            with zipfile.ZipFile(Path(temporary, "zip")) as archive:
                members = {Path(member).name: member for member in archive.namelist()}
                for file in names:  # and nothing else of what is in there, wherever it would go
                    with archive.open(members[file]) as source, Path(temporary, file).open("wb") as target:
                        shutil.copyfileobj(source, target)
            for file in names:
                Path(temporary, file).replace(folder / file)
    except (OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise GraphFilterError(
            f"{address} cannot be loaded ({type(error).__name__}: {one_line(error)}); check the connection, or name a "
            "folder of local files with --data"
        ) from error
    return folder


class Rows:
    """The rows of a .ts file: a line each, CHANNEL:CHANNEL:...:LABEL, of a channel the values between commas.

    Args:
        labels: Those of the training part; else the file's own.
        channels: Likewise.
    """

    def __init__(self, file: Path, labels: tuple[str, ...] = (), channels: int | None = None):
        self.file, self.labels, self.channels = file, labels, channels

    def table(self) -> Dataset:
        values, steps, numbers = [], [], []
        with self.file.open(encoding="utf-8-sig", errors="replace") as lines:  # descriptions are in any encoding
            self.read_header(lines)
            label_numbers = {label.casefold(): number for number, label in enumerate(self.labels)}
            for row, line in enumerate(filter(None, map(str.strip, lines)), 1):
                body, _, label = line.rpartition(":")
                label = label.strip()
                if label.casefold() not in label_numbers:
                    raise GraphFilterError(
                        f"{self.file}: row {row} has the label {label!r}, which is not of the training part's: "
                        f"{', '.join(self.labels)}"
                    )
                values.append(self.read_row(row, body.split(":") if body else []))
                steps.append(len(values[-1]))
                numbers.append(label_numbers[label.casefold()])
        if not values:
            raise GraphFilterError(f"{self.file} has no rows after @data")
        step_offsets = np.arange(0, sum(map(np.size, values)) + 1, self.channels, dtype=np.int32)
        row_offsets = np.array([0, *accumulate(steps)], dtype=np.int32)
        flat = pa.array(np.concatenate(values).ravel())
        nested = pa.ListArray.from_arrays(row_offsets, pa.ListArray.from_arrays(step_offsets, flat))
        return Dataset(pa.table({"series": nested, "label": numbers}))

    def read_header(self, lines: Iterator[str]) -> None:
        """Read what stands before the rows."""
        tags = {}
        for line in lines:
            words = line.split()
            if words and words[0].startswith("@"):
                tags[words[0].lower()] = words[1:]
                if words[0].lower() == "@data":
                    break
            elif words and not words[0].startswith("#"):
                raise GraphFilterError(f"{self.file} has a line before @data that is no tag: {line.strip()[:60]!r}")
        else:
            raise GraphFilterError(f"{self.file} has no line @data")
        if tags.get("@timestamps", ["false"])[0].lower() != "false":
            raise GraphFilterError(f"{self.file} has time stamps, which this reader does not know")
        if tags.get("@classlabel", ["false"])[0].lower() != "true" or len(tags["@classlabel"]) < 3:
            raise GraphFilterError(f"{self.file} has no line @classLabel true with the labels of two classes at least")
        self.labels = self.labels or tuple(tags["@classlabel"][1:])
        channels = tags.get("@dimensions", tags.get("@dimension", ["1"] if tags.get("@univariate") == ["true"] else []))
        if channels and channels[0].isdigit():
            self.channels = self.channels or int(channels[0])

    def read_row(self, row: int, channels: list[str]) -> np.ndarray:
        """Return the values of a row, (steps, channels)."""
        if not channels:
            raise GraphFilterError(f"{self.file}: row {row} has no series")
        self.channels = self.channels or len(channels)
        if len(channels) != self.channels:
            raise GraphFilterError(
                f"{self.file}: row {row} has {len(channels)} channels, {self.channels} were expected"
            )
        try:
            with np.errstate(over="ignore"):
                values = np.array([[*map(float, channel.split(","))] for channel in channels], dtype=np.float32)
        except ValueError:  # or channels of several lengths
            values = np.array(np.nan)
        if not np.isfinite(values).all():
            raise GraphFilterError(f"{self.file}: row {row} has {self.describe_mistake(channels)}")
        return values.T

    @staticmethod
    def describe_mistake(channels: list[str]) -> str:
        """Return what is wrong with a row, in words."""
        for number, channel in enumerate(channels, 1):
            for step, value in enumerate(channel.split(","), 1):
                if value.strip().lower() in ("?", "nan", ""):
                    return f"no value in channel {number} at step {step}: fill missing values before"
                try:
                    finite = abs(float(value)) <= float(np.finfo(np.float32).max)
                except ValueError:
                    finite = False
                if not finite:
                    return f"the value {value.strip()[:40]!r} in channel {number}"
        lengths = [channel.count(",") + 1 for channel in channels]
        odd = next(i for i, (a, b) in enumerate(pairwise(lengths), 2) if a != b)
        return f"{lengths[odd - 1]} steps in channel {odd}, and {lengths[0]} in channel 1"
