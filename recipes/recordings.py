"""The recordings of the speech recipe: files and rows of the Hub, read, resampled and joined."""

import io
import zlib
from dataclasses import dataclass
from math import gcd
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


def mark_sources(sources: Sources) -> list[tuple[Any, ...] | None]:
    """Return what changes if a recording does."""
    return [_mark(source) for source in sources]


def _mark(source: str | HubRow) -> tuple[Any, ...] | None:
    if isinstance(source, HubRow):
        return source.rows._fingerprint, source.number
    file = Path(source)
    return (file.stat().st_size, file.stat().st_mtime_ns) if file.is_file() else None


def read_audio(sources: Sources, rate: int, speed: float = 1.0) -> np.ndarray:
    """Return one channel at ``rate`` samples per second; several sources are joined, with short pauses between them.

    Raises:
        ValueError: it cannot be used, with the reason.
    """
    import soundfile  # of the extra speech, asked for by `prepare`

    pieces: list[np.ndarray] = []
    for file in _open(sources):
        if isinstance(file, str) and not Path(file).is_file():
            raise ValueError("there is no such file")
        try:
            samples, source_rate = soundfile.read(file, dtype="float32", always_2d=True)
        except (soundfile.SoundFileError, OSError, TypeError) as error:  # TypeError: of a file without a header
            raise ValueError(f"it cannot be read ({line(error)})") from error
        pieces.append(resample(samples.mean(1), round(source_rate * speed), rate))
    # The names without their folder: the pauses are the same wherever the data lies.
    samples = join(pieces, [Path(item).name if isinstance(item, str) else str(item.number) for item in sources], rate)
    if len(samples) < SHORTEST * rate:
        raise ValueError(f"it is {len(samples) / rate:.3f} seconds long, less than a tenth")
    if not np.isfinite(samples).all():
        raise ValueError("it has samples that are no numbers")
    if np.abs(samples).max() < 1e-5:
        raise ValueError("it is silent")
    return samples


def group(seconds: list[float], kinds: list[int], most: float) -> list[list[int]]:
    """Return neighbouring recordings of one kind (a speed) together, as many as fit with pauses into ``most`` seconds.

    Example:
        >>> group([10.0, 10.0, 15.0, 40.0], [0, 0, 0, 0], most=30.0)
        [[0, 1], [2], [3]]
    """
    groups: list[list[int]] = []
    open_groups: dict[int, tuple[list[int], float]] = {}
    for i, (kind, length) in enumerate(zip(kinds, seconds, strict=True)):
        members, room = open_groups.get(kind, ([], 0.0))
        if (needed := length + PAUSE[1]) > room:
            members, room = [], most
            groups.append(members)
        members.append(i)
        open_groups[kind] = members, room - needed
    return groups


def join(pieces: list[np.ndarray], names: list[str], rate: int) -> np.ndarray:
    """Return recordings one after the other, with short pauses of faint noise that depend on their names."""
    draw = np.random.default_rng(zlib.crc32(" ".join(names).encode()))
    parts = pieces[:1]
    for piece in pieces[1:]:
        parts += [draw.normal(0, 1e-3, round(draw.uniform(*PAUSE) * rate)).astype(np.float32), piece]
    return np.concatenate(parts)


def _open(sources: Sources) -> list[str | io.BytesIO]:
    return [item.read() if isinstance(item, HubRow) else item for item in sources]


def resample(samples: np.ndarray, found: int, rate: int) -> np.ndarray:
    """Return the samples at ``rate`` per second; they come at ``found`` per second."""
    if found == rate or not len(samples):
        return samples
    divisor = gcd(found, rate)
    return resample_poly(samples, rate // divisor, found // divisor).astype(np.float32)


def to_integers(samples: np.ndarray) -> np.ndarray:
    """Return samples from -1 to 1 as they are kept, in 16 bits."""
    return np.round(np.clip(samples, -1, 1) * (2**15 - 1)).astype(np.int16)


def to_wave(audio: bytes) -> np.ndarray:
    """Return the samples from -1 to 1 that are kept as ``audio``."""
    return np.frombuffer(audio, np.int16).astype(np.float32) / (2**15 - 1)
