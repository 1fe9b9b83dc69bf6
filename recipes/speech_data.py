"""The recordings and transcripts of the speech recipe: folders, LibriSpeech, Common Voice, digits and the Hub."""

import random
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from hf_graphfilter import GraphFilterError
from recipes.data import choose, load_from_hub, split_holdout
from recipes.files import first_file, read_rows
from recipes.recordings import HubRow
from recipes.transcripts import normalize

SPELLINGS = {"audio": ("file", "file_name", "path", "audio"), "text": ("text", "sentence", "transcription", "raw_text")}
PARTS = {"train": "train", "dev": "validation", "valid": "validation", "validation": "validation", "test": "test"}
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
SEQUENCES = {"train": (2000, range(10, 50)), "validation": (200, range(5, 10)), "test": (200, range(5))}


@dataclass(frozen=True)
class SpeechTask:
    """Where recordings are read from.

    Args:
        metric: by which runs are compared.
        hub: data set of the Hub, ``NAME`` or ``NAME:CONFIG``.
        parts: the parts of that data set.
        page: where its archives are, if the Hub has none.
    """

    metric: str = "test/wer"
    hub: str | None = None
    parts: tuple[tuple[str, str], ...] = ()
    page: str = ""


TASKS = {
    "folder": SpeechTask(),
    "digits": SpeechTask(),
    "mboshi": SpeechTask("test/cer"),
    "fillets-cs": SpeechTask(),
    "librispeech-100": SpeechTask(hub="openslr/librispeech_asr:clean", parts=(("train", "train.100"),)),
    "librispeech-960": SpeechTask(hub="openslr/librispeech_asr:all"),
    "common-voice": SpeechTask(page="https://datacollective.mozillafoundation.org"),  # left the Hub in October 2025
}
LIBRISPEECH = {  # the folders of its archives
    "librispeech-100": {"train": ["train-clean-100"]},
    "librispeech-960": {"train": ["train-clean-100", "train-clean-360", "train-other-500"]},
}
HELD_OUT = {"validation": ["dev-clean"], "test": ["test-clean"], "test_other": ["test-other"]}


# ------------------------------------------------------------------------------------------ recordings and transcripts


def read(args: Any) -> tuple[dict[str, list[dict[str, Any]]], str]:
    """Return (rows of each part, with ``audio``, what it is called and the text; how they were split).

    With ``--held_out`` a share of the training sentences replaces the other parts. It is cut here, before recordings
    are copied at other speeds.
    """
    parts, split = _read_parts(args)
    if args.held_out and args.task != "digits":
        parts = _cut_sentences(parts["train"], args.held_out, "validation", args.normalize)
    return parts, split


def _read_parts(args: Any) -> tuple[dict[str, list[dict[str, Any]]], str]:
    task = TASKS.get(args.task) or SpeechTask(hub=args.task)
    if args.data is None:
        if task.hub is None:
            source = f"; its archives are at {task.page}" * bool(task.page)
            raise GraphFilterError(f"--task {args.task} needs --data, the folder with its recordings{source}")
        return _complete(_read_hub(task), "official", args.normalize)
    root = Path(args.data)
    if not root.is_dir():
        raise GraphFilterError(f"--data: there is no folder {root}{': it is a file' * root.exists()}")
    if args.task == "digits":
        return _read_digits(root, args.held_out), "recordings 0 to 4 of each speaker and digit test, 5 to 9 validation"
    if args.task in LIBRISPEECH and not (root / "metadata.csv").is_file():
        return _read_librispeech(root, args.task), "official"
    if args.task == "common-voice" and not (root / "metadata.csv").is_file():
        return _read_common_voice(root), "official"
    return _complete(_read_folder(root), "given", args.normalize)


def _cut_sentences(rows: list[dict[str, Any]], share: float, part: str, how: str) -> dict[str, list[dict[str, Any]]]:
    """Return a training part and another one without a sentence in common, in their normal form ``how``."""
    texts = [normalize(row["text"], how) for row in rows]
    sentences = sorted({*texts} - {""})
    part_sentences = {sentences[i] for i in split_holdout(len(sentences), share)[1]}
    return {
        "train": [row for row, text in zip(rows, texts, strict=True) if text not in part_sentences],
        part: [row for row, text in zip(rows, texts, strict=True) if text in part_sentences],
    }


def _read_folder(root: Path) -> dict[str, list[dict[str, Any]]]:
    file = first_file(root, ["metadata.csv", "metadata.jsonl"])
    parts: dict[str, list[dict[str, Any]]] = {}
    for number, (split, item) in enumerate(_read_table(file, root, "split"), 1):
        if (part := PARTS.get(str(split))) is None:
            raise GraphFilterError(f"{file}: row {number} has the split {split!r}, expected {', '.join(PARTS)}")
        parts.setdefault(part, []).append(item)
    return parts


def _read_table(file: Path, clips: Path, split: str = "") -> list[tuple[Any, dict[str, Any]]]:
    """Return (what the column ``split`` holds, the recording with its text) of each row."""
    rows, items = read_rows(file), []
    if not rows:
        raise GraphFilterError(f"{file} holds no rows")
    names = choose(SPELLINGS | ({"split": (split,)} if split else {}), list(rows[0]), file)
    for number, row in enumerate(rows, 1):
        if missing := [name for name in names.values() if name not in row]:
            raise GraphFilterError(f"{file}: row {number} has no {missing[0]!r}, found {', '.join(row)}")
        audio, text = str(row[names["audio"]]), row[names["text"]]
        if not isinstance(text, str | None):
            raise GraphFilterError(f"{file}: row {number} has the transcript {text!r}, expected a text")
        item = {"audio": [str(clips / audio)], "name": audio, "text": text or ""}
        items.append((row[names["split"]] if split else None, item))
    return items


def _complete(
    parts: dict[str, list[dict[str, Any]]], split: str, how: str
) -> tuple[dict[str, list[dict[str, Any]]], str]:
    """Return (all parts, how they were split): a missing one is a tenth of the training sentences."""
    if "train" not in parts:
        raise GraphFilterError(f"the parts are {', '.join(parts)}: train is missing")
    for part in ("validation", "test"):
        if part not in parts:
            count = len({normalize(row["text"], how) for row in parts["train"]} - {""})
            if count < 2:
                raise GraphFilterError(f"the parts are {', '.join(parts)}: train has one sentence")
            parts |= _cut_sentences(parts["train"], max(0.1, 1 / count), part, how)
            split = f"{split}, {part} a tenth of the training sentences"
    return parts, split


def _read_digits(root: Path, held_out: float) -> dict[str, list[dict[str, Any]]]:
    """Return sequences of two to five digits by one speaker, the same ones always.

    No recording is in two parts. ``held_out`` is the share of the training recordings that replaces the other parts.
    """
    sequences: dict[str, tuple[int, Collection[int]]] = dict(SEQUENCES)
    if held_out:
        count, numbers = SEQUENCES["train"]
        train, validation = ([numbers[i] for i in places] for places in split_holdout(len(numbers), held_out))
        sequences = {"train": (count, train), "validation": (SEQUENCES["validation"][0], validation)}
    folder = root / "recordings" if (root / "recordings").is_dir() else root
    files: dict[str, dict[int, list[Path]]] = {}
    for file in sorted(folder.glob("*.wav")):
        if match := re.fullmatch(r"(\d)_(\w+)_(\d+)", file.stem):
            files.setdefault(match[2], {}).setdefault(int(match[3]), []).append(file)
    if not files:
        raise GraphFilterError(f"--data: {folder} has no recordings DIGIT_SPEAKER_NUMBER.wav")
    draw = random.Random(0)
    parts = {}
    for part, (count, numbers) in sequences.items():
        speaker_files = {k: [f for n, group in v.items() if n in numbers for f in group] for k, v in files.items()}
        speaker_files = {speaker: group for speaker, group in speaker_files.items() if group}
        rows = []
        for _ in range(count if speaker_files else 0):
            digits = draw.choices(speaker_files[draw.choice(sorted(speaker_files))], k=draw.randint(2, 5))
            text = " ".join(DIGITS[int(file.stem[0])] for file in digits)
            rows.append({"audio": [*map(str, digits)], "name": " ".join(file.name for file in digits), "text": text})
        parts[part] = rows
    return parts


def _read_librispeech(root: Path, task: str) -> dict[str, list[dict[str, Any]]]:
    parts = {}
    for part, folders in {**LIBRISPEECH[task], **HELD_OUT}.items():
        rows = []
        for file in (f for name in folders for f in sorted((root / name).rglob("*.trans.txt"))):
            for row in read_rows(file):
                name, _, text = row["text"].partition(" ")
                rows.append({"audio": [str(file.parent / f"{name}.flac")], "name": name, "text": text})
        if not rows:
            raise GraphFilterError(f"--data: {root} has no transcripts *.trans.txt in {' or '.join(folders)}")
        parts[part] = rows
    return parts


def _read_common_voice(root: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the parts of the folder of a language, as it is unpacked."""
    files = {"train": "train.tsv", "validation": "dev.tsv", "test": "test.tsv"}
    return {
        part: [item for _, item in _read_table(first_file(root, [name]), root / "clips")]
        for part, name in files.items()
    }


def _read_hub(task: SpeechTask) -> dict[str, list[dict[str, Any]]]:
    name, _, config = (task.hub or "").partition(":")
    columns = {**SPELLINGS, "audio": ("audio", "file", "path")}
    data = load_from_hub(name, columns, config or None)
    named = dict(task.parts) or {"train": "train"}
    if "train.clean.100" in data:  # LibriSpeech has its training part in three
        named = {"train": "train.clean.100 train.clean.360 train.other.500", "validation": "validation.clean"}
        named |= {"test": "test.clean", "test_other": "test.other"}
    for spelling in ("validation", "test", *PARTS):
        if spelling in data:
            named.setdefault(PARTS[spelling], spelling)
    parts: dict[str, list[dict[str, Any]]] = {}
    for part, sources in named.items():
        for rows in (data[source] for source in sources.split() if source in data):
            rows = rows.cast_column("audio", datasets.Audio(decode=False))
            items = [{"audio": [HubRow(rows, i)], "text": text or ""} for i, text in enumerate(rows["text"])]
            parts.setdefault(part, []).extend({**item, "name": f"row {i} of {part}"} for i, item in enumerate(items))
    return parts
