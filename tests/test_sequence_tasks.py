"""The tasks of sequences: each official format on a small sample of it, parts and folds, and what cannot be read."""

import gzip
import zipfile
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from PIL import Image

from hf_graphfilter import GraphFilterError
from recipes import data as tables
from recipes.sequence_tasks import FOLDS, TASKS, fasta, load, lra, read, series

DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(autouse=True)
def nothing_is_kept():
    read.cache_clear()


def write(folder, files):
    """Files by their paths; lists are lines."""
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


def grey(value, width=32):
    return Image.fromarray(np.full((32, width), value, dtype=np.uint8))


def documents(count, classes=("cats", "dogs")):
    return {f"{name}/{n:02}.txt": f"Number {n} is one of the {name}." for n in range(count) for name in classes}


def ts(*rows, dimensions="@dimensions 2"):
    header = ["#a comment", "@problemName X", "@timeStamps false", "@univariate false", dimensions]
    return [*header, "@equalLength false", "@classLabel true a B", "@data", *rows]


def both(name, train, test=None):
    return {name.format("train", "TRAIN"): train, name.format("test", "TEST"): train if test is None else test}


SERIES = both("BasicMotions_{1}.ts", ts("1,2,3:4,5,6:a", "1.5,-2e1:3,4:b"), ts("7:8:A"))
LISTOPS = ["Source\tTarget", "( ( ( [MAX 2 ) 9 ) ] )\t9", "( ( [MIN ( ( ( [SM 5 ) 6 ) ] ) ) ] )\t1"]
ROWS = ["text,label", *(f'"a, ""{n}""",{"yes" if n % 2 else "no"}' for n in range(20))]
LISTED = [f"imgs/{n % 2} sample_{n}.png {n} {n % 2} 1.8 14" for n in range(20)]
PATHS = {f"imgs/{n % 2}/sample_{n}.png": grey(n) for n in range(20)}
IMAGES = {f"{part}/{name}/0.png": grey(7) for part in ("train", "test") for name in ("cat", "dog")}
COLOURED = {name: Image.new("RGB", (32, 32), (0, 255, 0)) for name in IMAGES}
DNA = {"Bos.fa": [">r1 of a cow", "acg", "tR-"] * 10, "Sus.fna.gz": gzip.compress(b">r2\nGATTACA\n" * 10)}
FOLDED = [(n, fold) for fold in ("a.1", "c.23", "g.3") for n in range(1 if fold == "g.3" else 10)]
SCOPE = [f">d{n}xxa_ {fold}.2.{n} (A:) Protein {{Homo}}\n{'ga' if fold == 'a.1' else 'mxa'}" for n, fold in FOLDED]
NOTES = ["SUBJECT_ID,HADM_ID,TEXT,LABELS,length", '1,7,"cough, fever",401.9;038.9,2', "2,8,pain,272.4,1"]
PAIRS = ["1.0\tid1\tid2\tone paper\tanother", "0.0\tid1\tid3\tone paper\ta third"]
AAN = {f"tsv_data/new_aan_pairs.{part}.tsv": PAIRS for part in ("train", "eval", "test")}
NEWS = ['"3","Title","Some ""text"", quoted"', '"4","Title 2","More"', '"1","T","W"', '"2","T","S"']

# task: (its files, the number of rows in each part, a row of the training part)
SAMPLES = {
    "bbc": (documents(12), (12, 4, 8), None),
    "20newsgroups": (both("20news-bydate-{}/a/1", "x") | both("20news-bydate-{}/b/1", "y"), (2, 2), None),
    "imdb": (
        both("imdb/{}/neg/1.txt", "bad") | both("imdb/{}/pos/1.txt", "good") | {"imdb/train/unsup/1.txt": "?"},
        (2, 2),
        {"text_a": "good", "label": 1},
    ),
    "mimic-iii-50": (
        {f"{part}_50.csv": NOTES for part in ("train", "dev", "test")},
        (2, 2, 2),
        {"text_a": "cough, fever", "label": [1.0, 0.0, 1.0]},
    ),
    "longdoc": (
        documents(10, ("cs.AI", "cs.CE", "cs.NE", "math.AC", "math.GR")),
        (24, 8, 8),
        None,
    ),
    "r8": (both("r8-{}-all-terms.txt", ["earn\tcents", "acq\tbuys"]), (2, 2), {"text_a": "cents", "label": 1}),
    "ag-news": (both("{}.csv", NEWS), (4, 4), {"text_a": 'Title Some "text", quoted', "label": 2}),
    "texts": ({"all.csv": ROWS}, (11, 3, 6), None),
    "dna": (DNA, (12, 4, 4), {"text_a": "ACGTNN", "label": 0}),
    "ensembl-bs": (
        {
            "ensembl-bs/x.fasta": [f">r{n}\nAC" for n in range(20)],
            "ensembl-bs/labels.tsv": [f"r{n}\t{n % 2}" for n in range(20)],
        },
        (12, 4, 4),
        {"text_a": "AC", "label": 1},
    ),
    "proteins": (
        {"a.fa": [">p1", "mkvJ"] * 10, "b.fa": [">p2", "GG"] * 10},
        (11, 3, 6),
        {"text_a": "M K V X", "label": 0},
    ),
    "scope40": ({"scop.fa": SCOPE}, (11, 3, 6), {"text_a": "M X A", "label": 1}),
    "listops": (
        {f"listops-1000/basic_{part}.tsv": LISTOPS for part in ("train", "val", "test")},
        (2, 2, 2),
        {"text_a": "[MIN [SM 5 6 ] ]", "label": 1},
    ),
    "listops-short": (
        {"test_d20s.tsv": [f"{n % 10}\t( ( [MAX {n % 10} ) ] )" for n in range(100)]},
        (70, 10, 20),
        None,
    ),
    "image": (IMAGES, (2, 2), {"input_ids": [7] * 1024, "label": 1}),
    "cifar100": (COLOURED, (2, 2), {"series": [[0.0, 1.0, 0.0] * 4] * 256, "label": 1}),
    "retrieval": (AAN, (2, 2, 2), {"text_a": "one paper", "text_b": "another", "label": 1}),
    "pathfinder": (
        {f"pathfinder32/curv_contour_length_14/{name}": image for name, image in PATHS.items()}
        | {"pathfinder32/curv_contour_length_14/metadata/0.npy": LISTED},
        (16, 2, 2),
        None,
    ),
    "BasicMotions": (SERIES, (2, 1), {"series": [[1.5, 3], [-20, 4]], "label": 1}),
}


@pytest.mark.parametrize("task", SAMPLES)
def test_official_formats_are_read(task, tmp_path):
    files, sizes, row = SAMPLES[task]
    loaded = load(task, str(write(tmp_path, files)), "auto" if len(sizes) == 3 else "none")
    assert tuple(map(len, loaded.parts.values())) == sizes
    for part in loaded.parts.values():
        if task != "mimic-iii-50":
            assert {*part["label"]} <= {*range(len(loaded.labels))}
        assert TASKS[task].kind != "pixels" or {*map(len, part["input_ids"])} == {1024}
    assert row is None or row in loaded.parts["train"].to_list()


def test_samples_are_of_all_loaders():
    """Tasks that differ by their folder's name only may be left out."""
    assert {TASKS[name].read for name in SAMPLES} >= {task.read for name, task in TASKS.items() if name not in LEFT_OUT}


LEFT_OUT = {"dashed-paths"}  # read in tests/test_generate.py


def test_patches_go_row_by_row_and_folds_of_few_proteins_are_left_out(tmp_path, capsys):
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    rows = lra.patches([(Image.fromarray(image), "x", 0)], size=2)
    steps = np.array(rows["series"][0]) * 255
    assert steps.shape == (256, 12)
    np.testing.assert_allclose(steps[17], image[2:4, 2:4].ravel(), atol=1e-3)
    loaded = load("scope40", str(write(tmp_path, {"scop.fa": SCOPE})))
    assert loaded.labels == ("a.1", "c.23")
    assert "left out: 1 proteins of 1 folds with less than 10" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["{}.csv", "{}.tsv", "{}.jsonl", "{}.json"])
def test_texts_of_any_format(name, tmp_path):
    content = {
        ".csv": ["Class,Text", "10,one", "9,two"],
        ".tsv": ["category\tcontent", "10\tone", "9\ttwo"],
        ".jsonl": ['{"target": 10, "sentence": "one"}', '{"target": 9, "sentence": "two"}'],
        ".json": '[{"label": 10, "document": "one"}, {"label": 9, "document": "two"}]',
    }[Path(name).suffix]
    loaded = load("texts", str(write(tmp_path, both(name, content) | {"valid" + Path(name).suffix: content})))
    assert list(loaded.parts) == ["train", "validation", "test"]
    assert (loaded.labels, loaded.split) == (("9", "10"), "official")
    assert sorted(loaded.parts["train"].to_list(), key=str) == [
        {"text_a": "one", "label": 1},
        {"text_a": "two", "label": 0},
    ]


def test_official_parts_and_other_encodings_are_read(tmp_path):
    for part in ("20news-bydate-train", "20news-bydate-test"):
        for name in ("a", "b", "unsup"):
            content = {
                f"{part}/{name}/{n}": f"café {n}".encode("latin-1" if name == "a" else "utf-8") for n in range(6)
            }
            write(tmp_path, content)
    loaded = load("20newsgroups-4cat", str(tmp_path), "none")
    assert (loaded.labels, loaded.split) == (("a", "b"), "official, no part validates")
    assert sorted(loaded.parts["test"]["text_a"]) == sorted(2 * [f"café {number}" for number in range(6)])
    assert len({*loaded.parts["test"]["label"][:6]}) == 2, "shuffled: some rows are of all classes"


def test_folds_cover_the_training_part(tmp_path):
    write(tmp_path, documents(12))
    whole = load("bbc", str(tmp_path), "none").parts
    parts = [load("bbc", str(tmp_path), fold=fold).parts for fold in range(FOLDS)]
    assert sorted(text for part in parts for text in part["validation"]["text_a"]) == sorted(whole["train"]["text_a"])
    for part in parts:
        assert not {*part["train"]["text_a"]} & {*part["validation"]["text_a"]}
        assert part["test"]["text_a"][:] == whole["test"]["text_a"][:]
        assert sum(part["validation"]["label"]) in (1, 2), "as many of both classes, or nearly"


@pytest.mark.parametrize(
    ("validation", "sizes", "split"),
    [
        ("auto", (12, 4, 4), "60/20/20 of the documents"),
        (
            "fold",
            (12, 4, 4),
            "60/20/20 of the documents, training and validation part together, a fifth of the training",
        ),
        ("test", (12, 4, 4), "60/20/20 of the documents, the test part validates too: what is chosen by it"),
        ("none", (12, 4), "60/20/20 of the documents, its validation part is not used, no part validates"),
    ],
)
def test_what_validates(validation, sizes, split, tmp_path):
    loaded = load("dna", str(write(tmp_path, DNA)), validation)
    assert tuple(map(len, loaded.parts.values())) == sizes
    assert loaded.split.startswith(split)
    assert (validation == "test") == (loaded.parts.get("validation") is loaded.parts["test"])


def test_series_of_the_archive_are_fetched_once(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(series, "ARCHIVE", tmp_path.as_uri())
    for offline, why in ((True, "HF_HUB_OFFLINE is set"), (False, "No such file")):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        with pytest.raises(GraphFilterError, match=f"BasicMotions.zip cannot be loaded .*{why}.* --data"):
            load("BasicMotions", None)
    with zipfile.ZipFile(tmp_path / "BasicMotions.zip", "w") as archive:
        for name, rows in SERIES.items():
            archive.writestr(f"../../{name}", "\n".join(rows))
        archive.writestr("../../evil", "")
    first = load("BasicMotions", None, "none")
    (tmp_path / "BasicMotions.zip").unlink()
    read.cache_clear()
    assert load("BasicMotions", None, "none").parts["train"].to_list() == first.parts["train"].to_list()
    kept = tmp_path / "cache" / "hf_graphfilter" / "uea" / "BasicMotions"
    assert sorted(file.name for file in kept.iterdir()) == sorted(SERIES)
    assert not list(tmp_path.rglob("evil"))


def test_data_of_the_hub(monkeypatch):
    def hub(name, *args, **options):
        column = {"img": [grey(3).convert("RGB")]} if "cifar" in name else {"text": ["a"]}
        rows = tables.Dataset.from_dict({**column, "label": [1]})
        return {"train": rows, "test": rows}

    monkeypatch.setattr(tables.datasets, "load_dataset", hub)
    assert load("ag-news", None, "none").parts["test"].to_list() == [{"text_a": "a", "label": 1}]
    assert load("image", None, "none").parts["train"].to_list() == [{"input_ids": [3] * 1024, "label": 1}]


def test_of_a_long_record_the_beginning_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(fasta, "LONGEST", 10)
    file = tmp_path / "x.fa"
    file.write_text(">a\nACGTACG>TACGTACGT\n>b c\nAC\n\nGT\n>c\nACGTACGTAC\nGT")
    assert list(fasta.records(file)) == [("a", "ACGTACGNTA"), ("b", "ACGT"), ("c", "ACGTACGTAC")]


TRAIN = "BasicMotions_TRAIN.ts"
WHOLE = {"BasicMotions": SERIES, "listops": {f"basic_{part}.tsv": LISTOPS for part in ("train", "val", "test")}}
BAD = {  # task, files beside those of WHOLE (nothing: a folder that is not there; None: no folder), the sentence
    "no data": ("bbc", None, "--task bbc needs --data, a folder that holds a folder of documents a class"),
    "no folder": ("bbc", {}, "--data: there is no folder .*nowhere"),
    "one class": ("bbc", {"cats/1.txt": "x"}, "must hold a folder of documents for each of two classes at least"),
    "no documents": ("bbc", {"cats/1.txt": "x", "dogs/in/1.txt": "y"}, "dogs holds no documents"),
    "few": ("bbc", {**documents(12), "birds/1.txt": "x"}, "the class birds has 1 documents to be split, 10 are needed"),
    "no class": ("bbc", both("{}/a/1", "x") | {"train/b/1": "y"}, "test has no folder b, which the training part has"),
    "empty": ("bbc", documents(12) | {"cats/3.txt": " \n"}, "3.txt is an empty document"),
    "no group": ("longdoc", {"cs.AI/1": "x"}, "has no folder cs.NE, which the task has"),
    "single": ("imdb", both("{}/neg/1", "x") | both("{}/pos/1", "y"), "the class neg has 1 documents to be split, 2"),
    "no tab": ("r8", both("r8-{}-all-terms.txt", ["earn cents"]), "train.*: row 1 has 1 columns, 2 were expected"),
    "new label": (
        "r8",
        both("r8-{}-all-terms.txt", ["earn\tx", "acq\ty"], ["earn\tx", "ship\ty"]),
        "test-all-terms.txt: row 2 has the label 'ship', which the training part does not have; its labels are acq",
    ),
    "new number": ("texts", both("{}.csv", ["text,label", "x,1", "y,2"], ["text,label", "x,0"]), "has the label '0'"),
    "fifth class": ("ag-news", both("{}.csv", ['"5","a","b"']), "train.csv: row 1 has the label '5'"),
    "quotes": ("ag-news", both("{}.csv", ['"1","a","b']), "train.csv cannot be read as csv"),
    "columns": (
        "texts",
        {"x.csv": ["words,label", "x,1"]},
        "x.csv has no column 'text' or 'sentence' .*'words', 'label'",
    ),
    "short row": ("texts", {"x.csv": ["text,label", "x"]}, "x.csv: row 1 has 1 columns, 2 were expected"),
    "comma": ("texts", {"x.csv": ["text,label", "well, no,1"]}, "x.csv: row 1 has 3 columns, 2 were expected"),
    "empty row": ("texts", {"x.csv": ["text,label", '"",1']}, "x.csv: row 1 has an empty document"),
    "one label": ("texts", {"x.csv": ["text,label", "x,1"]}, "x.csv must hold two classes at least"),
    "no rows": ("texts", {"x.json": "[]"}, "x.json holds no rows"),
    "odd rows": ("texts", {"x.json": "[1]"}, "x.json is no list of rows with named columns"),
    "no parts": ("texts", {"a.csv": "", "b.csv": ""}, "has 2 files and no two that are called train and test"),
    "no value": ("listops", {"basic_train.tsv": ["Source\tTarget", "[MAX 1 ]\t10"]}, "row 1 has the value '10'"),
    "symbol": ("listops", {"basic_train.tsv": ["Source\tTarget", "[SUM 1 ]\t1"]}, "row 1 has the symbol '\\[SUM'"),
    "nothing": ("listops", {"basic_train.tsv": ["Source\tTarget", "( )\t1"]}, "row 1 has no expression"),
    "header": ("listops", {"basic_train.tsv": LISTOPS[1:]}, "train.tsv has no column 'Source'; its columns are"),
    "no file": ("listops-short", {"test_d20.tsv": ""}, "has no test_d20s.tsv; it holds: test_d20.tsv"),
    "three": ("listops-short", {"test_d20s.tsv": ["1\t2\t3"]}, "d20s.tsv: row 1 has 3 columns, 2 were expected"),
    "four": (
        "retrieval",
        {**AAN, "tsv_data/new_aan_pairs.eval.tsv": ["1\ta\tb\tc"]},
        "eval.tsv: row 1 has 4 columns, 5",
    ),
    "cited": ("retrieval", {**AAN, "tsv_data/new_aan_pairs.eval.tsv": ["2\ta\tb\tc\td"]}, "row 1 has the label '2'"),
    "paper": ("retrieval", {**AAN, "tsv_data/new_aan_pairs.eval.tsv": ["1\ta\tb\tc\t"]}, "row 1 has an empty document"),
    "size": ("image", {**IMAGES, "test/dog/0.png": grey(1, 33)}, "0.png has 33 x 32 pixels, not 32 x 32"),
    "no image": ("image", {**IMAGES, "test/dog/0.png": b"x"}, "dog/0.png cannot be read as an image"),
    "no images": ("image", {**IMAGES, "test/owl/0.txt": ""}, "the class owl is in one of .*train and .*test only"),
    "no list": ("pathfinder", PATHS, "has no lists metadata/\\*.npy"),
    "pickle": ("pathfinder", {"metadata/0.npy": b"\x93NUMPY\x01\x00"}, "0.npy: line 1 is not FOLDER FILE NUMBER LABEL"),
    "outside": ("pathfinder", {"metadata/0.npy": ["../x y.png 0 1"]}, "line 1 leads out of"),
    "lost": ("pathfinder", {"metadata/0.npy": LISTED}, "line 1 names imgs/0/sample_0.png, which is not there"),
    "one file": ("dna", {"a.fa": ">x\nA"}, "must hold a FASTA file for each of two classes, or one and labels.tsv"),
    "no sequence": ("dna", {"a.fa": ">x\n>y\nA", "b.fa": ">z\nA"}, "a.fa: the record 'x' has no sequence"),
    "no name": ("dna", {"a.fa": "A\n>y\nA", "b.fa": ">z\nA"}, "a.fa has no line that begins with > before its first"),
    "code": (
        "mimic-iii-50",
        {"train_50.csv": NOTES, "dev_50.csv": NOTES[:2], "test_50.csv": [NOTES[0], "1,2,a,5,1"]},
        "has the code '5'",
    ),
    "no fold": ("scope95", {"a.fa": ">d1 a.1\nA"}, "the record 'd1 a.1' names no fold, such as a.1.1.1"),
    "one fold": ("scope95", {"a.fa": [">d1 a.1.1.1", "A"] * 10}, "a.fa has 1 folds with 10 proteins, two are needed"),
    "two files": ("scope40", {"a.fa": ">x\nA", "b.fa": ">x\nA"}, "has 2 FASTA files, one of SCOPe was expected"),
    "no gzip": ("dna", {"a.fa.gz": b"x", "b.fa": ">z\nA"}, "a.fa.gz cannot be read as gzip"),
    "unlabelled": (
        "dna",
        {"a.fa": ">x\nA", "labels.tsv": ["y\t1", "z\t2"]},
        "a.fa: the record 'x' is not in labels.tsv",
    ),
    "no @data": ("BasicMotions", {TRAIN: ts()[:-1]}, "TRAIN.ts has no line @data"),
    "no series": ("BasicMotions", {TRAIN: ts()}, "TRAIN.ts has no rows after @data"),
    "empty series": ("BasicMotions", {TRAIN: ts(":a", ":b")}, "TRAIN.ts: row 1 has no series"),
    "no tag": ("BasicMotions", {TRAIN: ["1,2:a"]}, "TRAIN.ts has a line before @data that is no tag: '1,2:a'"),
    "stamps": ("BasicMotions", {TRAIN: ["@timeStamps true", "@data"]}, "TRAIN.ts has time stamps"),
    "no classes": ("BasicMotions", {TRAIN: ["@targetlabel true", "@data"]}, "has no line @classLabel true with"),
    "channels": ("BasicMotions", {TRAIN: ts("1:2:a", "1:2:3:a")}, "row 2 has 3 channels, 2 were expected"),
    "steps": (
        "BasicMotions",
        {TRAIN: ts("1,2:3,4:a", "1,2:3:a")},
        "row 2 has 1 steps in channel 2, and 2 in channel 1",
    ),
    "missing": ("BasicMotions", {TRAIN: ts("1,2:3,?:a")}, "TRAIN.ts: row 1 has no value in channel 2 at step 2"),
    "nan": ("BasicMotions", {TRAIN: ts("1,NaN:3,4:a")}, "TRAIN.ts: row 1 has no value in channel 1 at step 2"),
    "word": ("BasicMotions", {TRAIN: ts("1,x:3,4:a")}, "TRAIN.ts: row 1 has the value 'x' in channel 1"),
    "infinite": ("BasicMotions", {TRAIN: ts("1,2:3,1e39:a")}, "TRAIN.ts: row 1 has the value '1e39' in channel 2"),
    "unknown": (
        "BasicMotions",
        {"BasicMotions_TEST.ts": ts("7:8:c")},
        "TEST.ts: row 1 has the label 'c', which is not",
    ),
    "other channels": (
        "BasicMotions",
        {"BasicMotions_TEST.ts": ts("7:a", dimensions="@dimensions 1")},
        "TEST.ts: row 1 has 1 channels, 2 were expected",
    ),
    "no task": ("bcc", {}, "there is no task bcc \\(did you mean 'bbc'\\?\\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_one_sentence(name, tmp_path):
    task, files, message = BAD[name]
    files = WHOLE.get(task, {}) | files if files else files
    folder = None if files is None else str(write(tmp_path, files)) if files else str(tmp_path / "nowhere")
    with pytest.raises(GraphFilterError, match=message) as caught:
        load(task, folder)
    assert "\n" not in str(caught.value)


def test_an_unknown_validation_is_one_sentence():
    with pytest.raises(GraphFilterError, match="--validation half: it is one of auto, fold, test, none"):
        load("bbc", None, "half")


@pytest.mark.skipif(not DATA.is_dir(), reason="shared data is absent")
@pytest.mark.parametrize(
    ("task", "folder", "sizes", "classes"),
    [
        ("BasicMotions", "uea", (32, 8, 40), 4),
        ("Handwriting", "uea", (120, 30, 850), 26),  # with two examples of some classes to train on
        ("JapaneseVowels", "uea/JapaneseVowels", (216, 54, 370), 9),
        ("listops-short", "", (7000, 1000, 2000), 10),
    ],
)
def test_real_files(task, folder, sizes, classes):
    loaded = load(task, str(DATA / folder))
    assert tuple(map(len, loaded.parts.values())) == sizes
    assert len(loaded.labels) == classes
    assert {*loaded.parts["test"]["label"]} == {*range(classes)}


def test_texts_with_several_labels_are_not_cut_into_folds(tmp_path):
    write(tmp_path, {f"{part}_50.csv": NOTES for part in ("train", "dev", "test")})
    with pytest.raises(GraphFilterError, match="several labels per text"):
        load("mimic-iii-50", str(tmp_path), "fold")
