"""The recordings of the speech recipe: files and rows of the Hub, read, joined and resampled."""

import io
import zlib
from dataclasses import dataclass
from math import gcd, inf
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from scipy.signal import resample_poly

from recipes.errors import line

PAUSE = (0.02, 0.2)  # seconds between two recordings that are joined, at least and at most
SHORTEST = 0.1  # seconds of a recording that is used


@dataclass
class HubRow:
    """A recording in a data set of the Hub, read when it is needed."""

    rows: Dataset
    number: int

    def read(self) -> io.BytesIO | str:
        audio = self.rows[self.number]["audio"]
        if not audio or not (audio["bytes"] or audio["path"]):
            raise ValueError("it has no recording")
        return io.BytesIO(audio["bytes"]) if audio["bytes"] else audio["path"]


Sources = list[str | HubRow]  # files, or rows of the Hub


def read_audio(sources: Sources, rate: int, speed: float = 1.0) -> np.ndarray:
    """Return one channel at ``rate`` samples per second; several sources are joined, with short pauses between them.

    Raises:
        ValueError: it cannot be used, with the reason.
    """
    import soundfile  # of the extra speech, asked for by `prepare`

    pieces: list[np.ndarray] = []
    # The names without their folder: the pauses are the same wherever the data lies.
    names = " ".join(Path(one).name if isinstance(one, str) else str(one.number) for one in sources)
    pauses = np.random.default_rng(zlib.crc32(names.encode()))
    for file in _open(sources):
        if isinstance(file, str) and not Path(file).is_file():
            raise ValueError("there is no such file")
        try:
            samples, found = soundfile.read(file, dtype="float32", always_2d=True)
        except (soundfile.SoundFileError, OSError) as error:
            raise ValueError(f"it cannot be read ({line(error)})") from error
        if pieces:
            pieces.append(pauses.normal(0, 1e-3, round(pauses.uniform(*PAUSE) * rate)).astype(np.float32))
        pieces.append(resample(samples.mean(1), round(found * speed), rate))
    samples = np.concatenate(pieces)
    if len(samples) < SHORTEST * rate:
        raise ValueError(f"it is {len(samples) / rate:.3f} seconds long, less than a tenth")
    if not np.isfinite(samples).all():
        raise ValueError("it has samples that are no numbers")
    if np.abs(samples).max() < 1e-5:
        raise ValueError("it is silent")
    return samples


def join_rows(rows: list[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """Return the rows with neighbouring recordings joined, as many as fit into ``seconds``.

    A recording that is too short, cannot be read or has no transcript keeps its own row, so that it is left out alone.
    """
    joined: list[dict[str, Any]] = []
    room = 0.0
    for row in rows:
        length = _measure(row["audio"]) + PAUSE[1] if row["text"] else inf
        if length <= room:
            joined[-1] = {name: joined[-1][name] + between + row[name] for name, between in _BETWEEN.items()}
            room -= length
        else:
            joined.append(row)
            room = seconds - length
    return joined


_BETWEEN: dict[str, Any] = {"audio": [], "name": " ", "text": " "}


def _measure(sources: Sources) -> float:
    """Return the seconds of a recording, infinite if it cannot be used."""
    import soundfile

    try:
        seconds = sum(soundfile.info(file).duration for file in _open(sources)) + PAUSE[1] * (len(sources) - 1)
    except (soundfile.SoundFileError, OSError, ValueError):
        return inf
    return seconds if seconds >= SHORTEST else inf


def _open(sources: Sources) -> list[str | io.BytesIO]:
    return [one.read() if isinstance(one, HubRow) else one for one in sources]


def resample(samples: np.ndarray, found: int, rate: int) -> np.ndarray:
    """Return the samples at ``rate`` per second; they come at ``found`` per second."""
    if found == rate or not len(samples):
        return samples
    common = gcd(found, rate)
    return resample_poly(samples, rate // common, found // common).astype(np.float32)
