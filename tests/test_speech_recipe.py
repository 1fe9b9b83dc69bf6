"""The recipe of speech: recordings, transcripts, batches, losses and whole runs. Made-up tones, no network."""

import csv
import io
import itertools
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from datasets import Dataset, DatasetDict, Features, Value
from hub_server import TOKEN, Hub
from processes import run_two
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    Data2VecAudioConfig,
    ParakeetFeatureExtractor,
    SeamlessM4TFeatureExtractor,
    Speech2TextFeatureExtractor,
    Wav2Vec2Config,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForCTC,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
    pipeline,
)
from transformers.models.whisper.modeling_whisper import shift_tokens_right
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from hf_graphfilter import GraphFilterError, filter_status, linearize
from hf_graphfilter.fitting.batches import inputs_of
from recipes import compare, data, metrics, runs, speech, speech_inputs, training
from recipes.joint_search import JointSearch
from recipes.models import load_model, model_config
from recipes.recordings import PAUSE, HubRow, mark_sources, read_audio, resample, to_integers
from recipes.records import try_read
from recipes.settings import Settings
from recipes.speech_data import read
from recipes.speech_inputs import SpeechBatches, count_frames, load_extractor, make_frames, prepare
from recipes.speech_models import build, check_model, ctc_loss, read_ctc
from recipes.transcripts import (
    decode,
    drop_long_targets,
    drop_long_texts,
    encode,
    make_tokenizer,
    normalize,
    train_characters,
)

soundfile = pytest.importorskip("soundfile")
pytest.importorskip("jiwer")

ROOT = Path(__file__).parents[1]
RATE = 16_000
TONES = {"low": 300, "mid": 900, "high": 2500}
SEQ2SEQ = ["--model", "speech_to_text", "--from_scratch", "d_model=16", "encoder_layers=2", "decoder_layers=1"]
SEQ2SEQ += ["encoder_attention_heads=2", "decoder_attention_heads=2", "encoder_ffn_dim=16", "decoder_ffn_dim=16"]
SEQ2SEQ += ["conv_channels=16"]
SIZES = '{"hidden_size":16,"num_hidden_layers":2,"num_attention_heads":2,"intermediate_size":16,"conv_kernel_size":3,'
SIZES += '"subsampling_factor":4,"subsampling_conv_channels":4,"num_mel_bins":80}'
CTC = ["--model", "parakeet_ctc", "--from_scratch", f"encoder_config={SIZES}"]
WAVES = ["--model", "wav2vec2-conformer", "--from_scratch", "hidden_size=16", "num_hidden_layers=2"]
WAVES += ["num_attention_heads=2", "intermediate_size=16", "conv_dim=[8,8]", "conv_stride=[20,16]"]
WAVES += ["conv_kernel=[40,16]", "num_conv_pos_embeddings=16", "num_conv_pos_embedding_groups=2"]
WAVES += ["conv_depthwise_kernel_size=3", "feat_extract_norm=layer", "mask_time_length=2", "mask_feature_length=2"]
WHISPER = ["--model", "whisper", "--from_scratch", "d_model=16", "encoder_layers=2", "decoder_layers=1"]
WHISPER += ["encoder_attention_heads=2", "decoder_attention_heads=2", "encoder_ffn_dim=16", "decoder_ffn_dim=16"]
WHISPER += ["max_source_positions=50", "max_target_positions=300"]
SHORT = ["--max_steps", "2", "--eval_strategy", "no", "--disable_tqdm", "true", "--use_cpu", "--task", "folder"]


def tone(names, rate=RATE, seconds=0.3):
    time = np.arange(round(seconds * rate)) / rate
    return np.concatenate([0.3 * np.sin(2 * np.pi * TONES[name] * time) for name in names.split()])


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def folder(tmp_path):
    """A folder of tones whose transcripts say how high they are."""
    root = tmp_path / "tones"
    (root / "audio").mkdir(parents=True)
    write_tones(root, 20)
    return root


def write_tones(root, count):
    names, draw = list(TONES), np.random.default_rng(0)
    rows = []
    for number in range(count):
        text = " ".join(draw.choice(names, 2 + number % 2))
        part = "train" if number < count - 8 else "dev" if number < count - 4 else "test"
        rows.append((f"audio/{number}.wav", text, part))
        soundfile.write(root / rows[-1][0], tone(text), RATE)
    write(root, rows)


def write(root, rows):
    with (root / "metadata.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("file", "text", "split"), *rows])


def arguments(folder, *argv, model=SEQ2SEQ):
    settings = Settings(speech.RECIPE)
    values, _ = settings.parse([*model, *SHORT, "--data", str(folder), *argv])
    return settings.arguments({**values, "output_dir": str(folder.parent / "run")})


def build_from(folder, *argv, model=SEQ2SEQ):
    """Return the model of these settings, as it is before training."""
    args, training_args = arguments(folder, *argv, model=model)
    tokenizer = train_characters(iter(["low mid high"]))
    return build(args, training_args, model_config(args), tokenizer, trained=bool(args.from_scratch))


def asked(task, data=None, held_out=0.0):
    """Return what ``read`` looks at."""
    return SimpleNamespace(task=task, data=data, held_out=held_out, normalize="none")


def train(tmp_path, folder, model, *argv):
    runs.main(speech.RECIPE, [*model, *SHORT, "--data", str(folder), "--output_dir", str(tmp_path / "run"), *argv])
    return try_read(tmp_path / "run" / "seed-1" / "record.json")


# ---------------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize(
    ("model", "names"),
    [
        pytest.param(SEQ2SEQ, {"wer", "cer", "ctc_wer", "ctc_cer"}, id="speech_to_text"),
        pytest.param(CTC, {"wer", "cer"}, id="parakeet"),
        pytest.param(WAVES, {"wer", "cer"}, id="wav2vec2-conformer"),
        pytest.param([*WHISPER, "--ctc_weight", "0"], {"wer", "cer"}, id="whisper", marks=pytest.mark.slow),
    ],
)
def test_a_run_trains_and_its_checkpoint_transcribes(model, names, folder, tmp_path, transformers_warnings):
    search = ["--ctc_decode_weight", "0.4", "--generation_num_beams", "2"] if model is SEQ2SEQ else []
    record = train(tmp_path, folder, model, "--speeds", "0.9", "1", *search)
    assert {f"test/{name}" for name in names} <= set(record["metrics"])
    assert all(math.isfinite(value) for value in record["metrics"].values())
    assert record["rows"] == {"train": 24, "validation": 4, "test": 4}
    assert record["left_out"] == {}
    saved = tmp_path / "run" / "seed-1"
    assert len(filter_status(load_model(saved))) > 0
    assert (saved / "joint_ctc_head.safetensors").is_file() == ("ctc_wer" in names)
    if model[1] == "whisper":  # a pipeline needs the tokenizer of Whisper
        transformers_warnings.clear()  # of its own generation
        return
    transcribe = pipeline("automatic-speech-recognition", str(saved), device="cpu")
    assert isinstance(transcribe(tone("low mid").astype(np.float32))["text"], str)
    transformers_warnings.clear()  # of the pipeline's own lengths, in earlier transformers


def test_the_ctc_head_starts_the_same_with_every_filter(folder):
    """Also with one whose weights are random, which are the same in every run of a seed."""
    baseline, first, second = (build_from(folder, "--filter", name) for name in ("none", "agf", "agf"))
    assert len(filter_status(first)) > 0
    assert torch.equal(first.joint_ctc_head.weight, baseline.joint_ctc_head.weight)
    assert all(torch.equal(x, second.state_dict()[name]) for name, x in first.state_dict().items())


def test_a_run_from_a_saved_model_starts_from_its_ctc_head(folder, tmp_path, capsys):
    model = build_from(folder)
    weight = model.joint_ctc_head.weight.clone()
    speech.save(model, Speech2TextFeatureExtractor(), tmp_path / "saved")
    saved = ["--model", str(tmp_path / "saved"), "--ctc_weight", "0.3", "--filter", "none"]  # it has its filter
    assert torch.equal(build_from(folder, model=saved).joint_ctc_head.weight, weight)
    assert "the CTC head is new" not in capsys.readouterr().err
    (tmp_path / "saved" / "joint_ctc_head.safetensors").unlink()
    assert not torch.equal(build_from(folder, model=saved).joint_ctc_head.weight, weight)
    assert "has no joint_ctc_head.safetensors that fits: the CTC head is new" in capsys.readouterr().err


def make_whisper(folder):
    """Write a small Whisper with the special tokens of the multilingual ones; return its vocabulary."""
    special = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES), "<|translate|>"]
    special += ["<|transcribe|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    vocabulary = {symbol: number for number, symbol in enumerate([*sorted(ByteLevel.alphabet()), *special])}
    ends = {f"{name}_token": special[0] for name in ("unk", "bos", "eos", "pad")}
    WhisperTokenizer(vocab=vocabulary, merges=[], extra_special_tokens=special[1:], **ends).save_pretrained(folder)
    WhisperFeatureExtractor(chunk_length=1).save_pretrained(folder)
    end, start = (vocabulary[token] for token in special[:2])
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "max_source_positions": 50}
    sizes |= {f"{stack}_{name}": n for stack in ("encoder", "decoder") for name, n in SIZES_OF_STACKS.items()}
    ids = {"decoder_start_token_id": start, "bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    ids |= {"suppress_tokens": None, "begin_suppress_tokens": None, "vocab_size": len(vocabulary)}
    model = WhisperForConditionalGeneration(WhisperConfig(**sizes, **ids))
    model.generation_config.is_multilingual, model.generation_config.max_length = True, 40
    model.generation_config.no_timestamps_token_id = vocabulary["<|notimestamps|>"]
    model.generation_config.lang_to_id = {f"<|{code}|>": vocabulary[f"<|{code}|>"] for code in LANGUAGES}
    model.generation_config.task_to_id = {task: vocabulary[f"<|{task}|>"] for task in ("translate", "transcribe")}
    model.generation_config._from_model_config = False  # or it would be read without these
    model.save_pretrained(folder)
    return vocabulary


def test_a_whisper_of_many_languages_is_fine_tuned(folder, tmp_path, transformers_warnings):
    of = make_whisper(tmp_path / "whisper")
    searched = ["--ctc_weight", "0.3", "--ctc_decode_weight", "0.4"]  # with a prompt of four tokens
    record = train(tmp_path, folder, ["--model", str(tmp_path / "whisper"), "--language", "czech", *searched])
    transformers_warnings.clear()
    assert math.isfinite(record["metrics"]["test/wer"])
    model = load_model(tmp_path / "run" / "seed-1")
    assert (model.generation_config.language, model.generation_config.task) == ("czech", "transcribe")
    tokenizer = WhisperTokenizer.from_pretrained(tmp_path / "run" / "seed-1")
    assert tokenizer("low")["input_ids"][:3] == [of["<|startoftranscript|>"], of["<|cs|>"], of["<|transcribe|>"]]


SYMBOLS = ["<pad>", "<s>", "</s>", "<unk>", "|", *"dghilmow"]


def make_wav2vec2(source):
    """Write a small Wav2Vec2 of CTC that was pretrained without a mask."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    convolutions = {"conv_dim": [8, 8], "conv_stride": [20, 16], "conv_kernel": [40, 16], "num_conv_pos_embeddings": 16}
    masks = {"mask_time_length": 2, "mask_feature_length": 2, "num_conv_pos_embedding_groups": 2}
    Wav2Vec2ForCTC(Wav2Vec2Config(**sizes, **convolutions, **masks, vocab_size=len(SYMBOLS))).save_pretrained(source)
    make_ctc_tokenizer(source, SYMBOLS)
    Wav2Vec2FeatureExtractor(return_attention_mask=False).save_pretrained(source)
    return str(source)


def make_ctc_tokenizer(folder, symbols):
    folder.mkdir(exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({symbol: number for number, symbol in enumerate(symbols)}))
    Wav2Vec2CTCTokenizer(folder / "vocab.json").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("argv", [[], ["--tokenizer", "characters"]], ids=["own", "characters"])
def test_a_wav2vec2_is_fine_tuned(argv, folder, tmp_path, transformers_warnings):
    """With its own vocabulary, or one of the training part; pretrained without a mask, it gets none."""
    source = make_wav2vec2(tmp_path / "wav2vec2")
    record = train(tmp_path, folder, ["--model", source], *argv)
    transformers_warnings.clear()  # of a head of another size
    assert math.isfinite(record["metrics"]["test/wer"])
    transcribe = pipeline("automatic-speech-recognition", str(tmp_path / "run" / "seed-1"), device="cpu")
    assert isinstance(transcribe(tone("low mid").astype(np.float32))["text"], str)


def test_a_tokenizer_with_more_tokens_than_the_head_is_refused(folder, tmp_path, capsys):
    """CTC would read what is beyond its logits, in silence."""
    source = make_wav2vec2(tmp_path / "wav2vec2")
    other = make_ctc_tokenizer(tmp_path / "other", [*SYMBOLS[:5], *"0123456789", *SYMBOLS[5:]])
    with pytest.raises(SystemExit):
        train(tmp_path, folder, ["--model", source], "--tokenizer", other)
    message = f"the tokenizer gives token 22, and {source} has outputs for 13: choose a --tokenizer"
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_size_of_a_vocabulary_goes_with_a_trained_one(folder):
    with pytest.raises(GraphFilterError, match="--train_tokenizer 300 and --tokenizer characters exclude each other"):
        arguments(folder, "--tokenizer", "characters", "--train_tokenizer", "300")


PUSH = """
import sys
import numpy as np
sys.path[:0] = [{root!r}, {tests!r}]
from transformers import pipeline
from hub_server import TOKEN
from hf_graphfilter import filter_status
from recipes import runs, speech
runs.main(speech.RECIPE, [*{argv!r}, "--hub_token", TOKEN])
transcribe = pipeline("automatic-speech-recognition", "me/speech_to_text-folder-gfsa", token=TOKEN, device="cpu")
text = transcribe(np.zeros(8000, dtype="float32"))["text"]
print("loaded", len(filter_status(transcribe.model)), type(text).__name__)
"""


@pytest.mark.slow
def test_a_pushed_model_transcribes_from_the_hub(folder, tmp_path):
    argv = [*SEQ2SEQ, *SHORT, "--data", str(folder), "--output_dir", str(tmp_path / "run"), "--push_to_hub"]
    program = PUSH.format(root=str(ROOT), tests=str(ROOT / "tests"), argv=argv)
    with Hub() as hub:
        environment = hub.environment(tmp_path / "home")
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "loaded 3 str" in done.stdout
    files = hub.repos["me/speech_to_text-folder-gfsa"]
    assert {"joint_ctc_head.safetensors", "model.safetensors", "preprocessor_config.json", "README.md"} <= set(files)
    about = yaml.safe_load(files["README.md"].decode().split("---")[1])
    assert about["pipeline_tag"] == "automatic-speech-recognition"
    assert {m["type"] for m in about["model-index"][0]["results"][0]["metrics"]} >= {"wer", "cer"}
    assert TOKEN not in done.stderr + done.stdout
    assert not any(TOKEN.encode() in content for content in files.values())


@pytest.mark.slow
def test_a_sweep_compares_transcripts(folder, tmp_path, transformers_warnings):
    argv = [*SEQ2SEQ, *SHORT, "--data", folder, "--output_dir", tmp_path / "run", "--results", tmp_path]
    compare.main(["speech", *map(str, argv), "--seeds", "1", "2", "--sweep", "K=2,3"])
    found = json.loads((tmp_path / "speech-folder-sweep.json").read_text())
    assert found["metric"] == "test/wer"
    played = {(run["variant"], run["seed"]) for run in found["runs"]}
    assert played == {(variant, seed) for variant in ("plain", "K=2", "K=3") for seed in (1, 2)}
    transformers_warnings.clear()  # of times on this file system, when an old checkpoint is deleted


@pytest.mark.slow
def test_an_interrupted_run_goes_on_with_its_ctc_head(folder, tmp_path, monkeypatch, transformers_warnings):
    options = ["--max_steps", "4", "--save_strategy", "steps", "--save_steps", "2"]
    whole = train(tmp_path / "whole", folder, SEQ2SEQ, *options)

    class Stop(training.CoefficientCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 3:
                raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(training, "CoefficientCallback", Stop)
        with pytest.raises(SystemExit):
            train(tmp_path / "broken", folder, SEQ2SEQ, *options)
    assert (tmp_path / "broken" / "run" / "seed-1" / "checkpoint-2").is_dir()
    broken = train(tmp_path / "broken", folder, SEQ2SEQ, *options)
    assert broken["metrics"] == pytest.approx(whole["metrics"], abs=1e-6)
    transformers_warnings.clear()  # of times on this file system, when an old checkpoint is deleted


@pytest.mark.slow
def test_two_processes_train_the_ctc_head_too(folder, tmp_path):
    argv = [*SEQ2SEQ, *SHORT, "--data", folder, "--tokenizer", "characters", "--output_dir", tmp_path / "runs"]
    run_two(ROOT / "recipes" / "speech.py", *argv, PYTHONPATH=str(ROOT))
    assert (tmp_path / "runs" / "seed-1" / "joint_ctc_head.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.skipif(not (DIGITS := ROOT.parent / "shared/data/fsdd").is_dir(), reason="no digits")
def test_connected_digits_are_transcribed(tmp_path):
    argv = ["--config", "speech/small.yaml", "--task", "digits", "--data", str(DIGITS), "--use_cpu"]
    runs.main(speech.RECIPE, [*argv, "--output_dir", str(tmp_path), "--disable_tqdm", "true", "--save_strategy", "no"])
    assert try_read(tmp_path / "seed-1" / "record.json")["metrics"]["test/wer"] < 0.1


# ---------------------------------------------------------------------------------------------------------- recordings


def test_recordings_are_mono_at_the_rate_of_the_model(tmp_path):
    file = tmp_path / "stereo.wav"
    both = np.stack([tone("mid", 8000), tone("mid", 8000) / 3], 1)
    soundfile.write(file, both, 8000)
    samples = read_audio([str(file)], RATE)
    assert samples.dtype == np.float32
    assert len(samples) == 2 * len(both)
    inner = slice(200, -200)
    np.testing.assert_allclose(samples[inner], tone("mid")[inner] * 2 / 3, atol=5e-3)
    assert len(resample(samples, round(RATE * 1.05), RATE)) == math.ceil(len(samples) / 1.05)


def test_features_are_those_of_the_extractor():
    extractor = Speech2TextFeatureExtractor()
    samples = (tone("low high") + np.random.default_rng(0).normal(0, 1e-3, 9600)).astype(np.float32)
    expected = extractor(samples, sampling_rate=RATE, return_tensors="np")["input_features"][0]
    np.testing.assert_allclose(make_frames(extractor, samples), expected, atol=1e-4)


BAD = {
    "missing.wav": (None, "there is no such file"),
    "broken.wav": (b"RIFF, and nothing else", "it cannot be read"),
    "empty.wav": (np.zeros(0), "it is 0.000 seconds long, less than a tenth"),
    "silent.wav": (np.zeros(RATE), "it is silent"),
    "nan.wav": (np.full(RATE, np.nan), "it has samples that are no numbers"),
    "long.wav": (tone("low", seconds=2.0), "it is 2.0 seconds long, and 1.5 are the most that --max_seconds"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used_is_counted_and_named(name, folder, capsys):
    content, reason = BAD[name]
    if isinstance(content, bytes):
        (folder / name).write_bytes(content)
    elif content is not None:
        soundfile.write(folder / name, content, RATE, subtype="FLOAT")
    write(folder, [(name, "low", "train"), *(("audio/0.wav", "low", part) for part in ("train", "dev", "test"))])
    args, _ = arguments(folder, "--max_seconds", "1.5")
    rows, split = read(args)
    assert split == "given"
    data, left_out = prepare(rows["train"], Speech2TextFeatureExtractor(), args, "train")
    assert len(data) == left_out == 1
    said = capsys.readouterr().err
    assert f"folder, train part: 1 of 2 recordings are left out; the first, {name}: {reason}" in said
    strict, _ = arguments(folder, "--max_seconds", "1.5", "--bad_audio", "error")
    with pytest.raises(GraphFilterError, match=f"{name}: .*--bad_audio skip leaves such recordings out"):
        prepare(rows["train"], Speech2TextFeatureExtractor(), strict, "train")


def test_a_smoke_test_reads_no_more_recordings_than_it_uses(folder, tmp_path, monkeypatch):
    """Those that cannot be used are replaced by others; a limit alone chooses among all that can be used."""
    opened = []

    def read_and_count(sources, *rest):
        opened.append(sources[0])
        return read_audio(sources, *rest)

    monkeypatch.setattr(speech_inputs, "read_audio", read_and_count)
    with (folder / "metadata.csv").open() as file:
        rows = list(csv.reader(file))[1:]
    write(folder, [(name, "" if number in (0, 6) else text, part) for number, (name, text, part) in enumerate(rows)])
    limits = ("--max_train_samples", "4", "--max_eval_samples", "2", "--filter", "none", "--save_strategy", "no")
    record = train(tmp_path / "smoke", folder, CTC, *limits, "--smoke", "--speeds", "0.9", "1")
    assert record["rows"] == {"train": 4, "validation": 2, "test": 2}
    assert record["left_out"] == {"train": 4}
    assert len(opened) == len(set(opened)) + 2 == 8, "two training recordings at two speeds"
    opened.clear()
    record = train(tmp_path / "limited", folder, CTC, *limits)
    assert record["rows"] == {"train": 4, "validation": 2, "test": 2}
    assert len(opened) == 18, "all with a transcript"


def test_long_recordings_are_cut_where_that_is_asked_for(folder):
    args, _ = arguments(folder, "--max_seconds", "0.2", "--too_long", "cut")
    data, left_out = prepare(read(args)[0]["test"], Speech2TextFeatureExtractor(), args, "test")
    assert left_out == 0
    assert max(data["seconds"]) == pytest.approx(0.2)


def test_whisper_never_cuts_a_recording_without_a_word(folder, capsys):
    soundfile.write(folder / "long.wav", tone("low", seconds=2.0), RATE)
    write(folder, [(name, "low", "train") for name in ("long.wav", "audio/0.wav")])
    args, _ = arguments(folder)
    rows = [{"audio": [str(folder / name)], "name": name, "text": "low"} for name in ("long.wav", "audio/0.wav")]
    data, left_out = prepare(rows, WhisperFeatureExtractor(chunk_length=1), args, "train")
    assert len(data) == left_out == 1
    assert "long.wav: it is 2.0 seconds long, and 1 are the most" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [Speech2TextFeatureExtractor, WhisperFeatureExtractor])
def test_neighbouring_recordings_of_the_training_part_are_joined(folder, kind, capsys):
    """What cannot be used is left out before, alone."""
    lengths = {"a": 0.5, "b": 0.4, "missing": None, "c": 0.3, "short": 0.05, "untold": 0.3, "broken": 9, "d": 0.3}
    for name, seconds in lengths.items():
        if seconds:
            soundfile.write(folder / f"{name}.flac", tone("low", seconds=seconds), RATE)
    broken = (folder / "broken.flac").read_bytes()
    (folder / "broken.flac").write_bytes(broken[: len(broken) // 2])  # its header is whole
    rows = [(f"{name}.flac", "" if name == "untold" else name, "train") for name in lengths]
    write(folder, [*rows, *((f"{name}.flac", name, part) for name in "ab" for part in ("dev", "test"))])
    args, _ = arguments(folder, "--join_seconds", "1.7", "--speeds", "1", "0.9")
    parts = read(args)[0]
    data, left_out = prepare(parts["train"], kind(), args, "train")
    assert data["text"] == ["a b", "a b", "c d", "c d"]
    least, most = (-1e-3, 1e-3) if kind is Speech2TextFeatureExtractor else PAUSE  # no pause between frames
    assert least <= data["seconds"][0] - 0.9 <= most
    assert least <= data["seconds"][1] - 1.0 <= most, "at another speed"
    width = 80 if kind is Speech2TextFeatureExtractor else 1
    assert [len(audio) for audio in data["audio"]] == [2 * width * length for length in data["length"]]
    assert data["training"] == [True] * 4
    assert left_out == 8  # each at both speeds
    assert "missing.flac: there is no such file" in capsys.readouterr().err
    other, _ = prepare(parts["test"], kind(), args, "test")
    assert other["text"] == ["a", "b"]


def test_an_empty_transcript_is_left_out(folder, capsys):
    write(folder, [("audio/0.wav", text, part) for part in ("train", "dev", "test") for text in ("low", "?!")])
    args, _ = arguments(folder, "--normalize", "words")
    data, left_out = prepare(read(args)[0]["test"], Speech2TextFeatureExtractor(), args, "test")
    assert len(data) == left_out == 1
    assert "its transcript is empty" in capsys.readouterr().err


def test_missing_parts_are_cut_by_sentence(folder):
    write(folder, [(f"audio/{i}.wav", f"sentence {i // 2}", "train") for i in range(20)])
    rows, split = read(arguments(folder)[0])
    assert split == "given, validation a tenth of the training sentences, test a tenth of the training sentences"
    texts = {part: {row["text"] for row in items} for part, items in rows.items()}
    assert {part: len(items) for part, items in rows.items()} == {"train": 16, "validation": 2, "test": 2}
    assert not texts["train"] & (texts["validation"] | texts["test"])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("file,text\na.wav,low\n", "has no column 'split'; its columns are 'file', 'text'"),
        ("file,text,split\na.wav,low,train\na.wav,low,late\n", "row 2 has the split 'late', expected train, dev"),
        ("file,text,split\na.wav,low,test\n", "the parts are test: train is missing"),
        ("file,text,split\na.wav,low,dev\na.wav,low,test\n", "the parts are validation, test: train is missing"),
        ("file,text,split\na.wav,low,train\n", "the parts are train: train has one sentence"),
        ("file,text,split\n", "holds no rows"),
    ],
)
def test_wrong_tables_are_one_clear_error(table, message, folder):
    (folder / "metadata.csv").write_text(table)
    with pytest.raises(GraphFilterError, match=message):
        read(arguments(folder)[0])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"file": "a.wav", "split": "train"}, "row 2 has no 'text', found file, split"),
        ({"file": "a.wav", "text": "low"}, "row 2 has no 'split'"),
        ({"file": "a.wav", "text": 5, "split": "train"}, "row 2 has the transcript 5, expected a text"),
    ],
)
def test_rows_of_json_lines_are_checked(row, message, folder):
    (folder / "metadata.csv").unlink()
    rows = [{"file": "a.wav", "text": "low", "split": "train"}, row]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(GraphFilterError, match=message):
        read(arguments(folder)[0])


def test_a_part_without_usable_recordings_is_one_clear_error(tmp_path, folder, capsys):
    write(folder, [("nowhere.wav", "low", "train"), ("audio/0.wav", "low", "dev"), ("audio/1.wav", "low", "test")])
    with pytest.raises(SystemExit):
        train(tmp_path, folder, SEQ2SEQ)
    assert "train part: all 1 recordings are left out; the first, nowhere.wav" in capsys.readouterr().err
    long = " ".join(["low high"] * 40)
    write(folder, [(f"audio/{n}.wav", long, part) for n, part in enumerate(["train", "train", "dev", "test"])])
    with pytest.raises(SystemExit):
        train(tmp_path / "ctc", folder, CTC)
    assert "all 2 training transcripts have more tokens than the encoder gives" in capsys.readouterr().err


def test_librispeech_is_read_as_it_is_unpacked(tmp_path):
    for part in ("train-clean-100", "dev-clean", "test-clean", "test-other"):
        chapter = tmp_path / part / "19" / "198"
        chapter.mkdir(parents=True)
        (chapter / "19-198.trans.txt").write_text("19-198-0000 HE SAID\n19-198-0001 NO\n")
    rows, split = read(asked("librispeech-100", data=str(tmp_path)))
    assert split == "official"
    assert [*rows] == ["train", "validation", "test", "test_other"]
    assert rows["train"][0]["audio"] == [str(tmp_path / "train-clean-100/19/198/19-198-0000.flac")]
    assert [row["text"] for row in rows["test"]] == ["HE SAID", "NO"]


def test_common_voice_is_read_as_it_is_unpacked(tmp_path):
    for part in ("train", "dev", "test"):
        rows = [f'a\tcommon_voice_en_{i}.mp3\tHe said "{part}".\t2\n' for i in range(2)]
        (tmp_path / f"{part}.tsv").write_text("client_id\tpath\tsentence\tup_votes\n" + "".join(rows))
    task = asked("common-voice", data=str(tmp_path))
    rows, split = read(task)
    assert split == "official"
    assert {part: len(items) for part, items in rows.items()} == {"train": 2, "validation": 2, "test": 2}
    expected = {"audio": [str(tmp_path / "clips/common_voice_en_1.mp3")], "name": "common_voice_en_1.mp3"}
    assert rows["validation"][1] == {**expected, "text": 'He said "dev".'}
    (tmp_path / "dev.tsv").unlink()
    with pytest.raises(GraphFilterError, match=r"has no dev.tsv; it holds: test.tsv, train.tsv"):
        read(task)
    with pytest.raises(GraphFilterError, match=r"needs --data.*its archives are at https://datacollective"):
        read(asked("common-voice", data=None))


@pytest.mark.parametrize("part", ["validation", "valid", "dev"])
def test_a_data_set_of_the_hub_is_read_when_it_is_needed(monkeypatch, part):
    def row(name, text):
        file = io.BytesIO()
        soundfile.write(file, tone(name, 8000), 8000, format="WAV")
        return {"audio": {"bytes": file.getvalue(), "path": f"{name}.wav"}, "sentence": text}

    def load(name, config, **options):
        assert (name, config) == ("some/set", "en")
        many = [row("low", f"sentence {i}") for i in range(10)]
        parts = {"train": many, part: [row("mid", None)]}
        columns = Features({"audio": {"bytes": Value("binary"), "path": Value("string")}, "sentence": Value("string")})
        return DatasetDict({part: Dataset.from_list(rows, features=columns) for part, rows in parts.items()})

    monkeypatch.setattr(data, "load_dataset", load)
    rows, split = read(asked("some/set:en", data=None))
    assert split == "official, test a tenth of the training sentences"
    assert {part: len(items) for part, items in rows.items()} == {"train": 9, "validation": 1, "test": 1}
    assert (rows["validation"][0]["text"], rows["validation"][0]["name"]) == ("", "row 0 of validation")
    samples = read_audio(rows["validation"][0]["audio"], RATE)
    frequency = np.abs(np.fft.rfft(samples)).argmax() / (len(samples) / RATE)
    assert frequency == pytest.approx(TONES["mid"], abs=RATE / len(samples))
    first, second = (rows["train"][i]["audio"] for i in (0, 1))
    assert mark_sources(first) != mark_sources(second)  # so that other recordings are no cached ones
    assert mark_sources(first) != mark_sources([HubRow(second[0].rows.select(range(5)), 0)])
    with pytest.raises(ValueError, match="it has no recording"):
        HubRow(Dataset.from_list([{"audio": None}]), 0).read()


def test_digits_are_sequences_of_one_speaker(tmp_path):
    for digit in range(3):
        for number in range(12):
            soundfile.write(tmp_path / f"{digit}_ann_{number}.wav", tone("low", 8000), 8000)
    rows, _ = read(asked("digits", str(tmp_path)))
    other = tmp_path / "elsewhere"
    other.mkdir()
    audio = [Path(file) for file in rows["test"][0]["audio"]]
    copies = [str(shutil.copy(file, other)) for file in audio]
    np.testing.assert_array_equal(read_audio(copies, RATE), read_audio([*map(str, audio)], RATE))
    assert len(rows["train"]) == 2000
    assert len(rows["test"]) == 200
    assert all(2 <= len(row["audio"]) <= 5 for row in rows["test"])
    assert set(" ".join(row["text"] for row in rows["test"]).split()) == {"zero", "one", "two"}
    files = {part: {file for row in items for file in row["audio"]} for part, items in rows.items()}
    assert not files["train"] & files["test"]
    for number in range(12, 50):
        shutil.copy(tmp_path / "0_ann_0.wav", tmp_path / f"0_ann_{number}.wav")
    rows, _ = read(asked("digits", str(tmp_path), held_out=0.2))
    held_out, kept = ({file for row in rows[part] for file in row["audio"]} for part in ("validation", "train"))
    assert held_out
    assert held_out <= {str(tmp_path / f"{digit}_ann_{n}.wav") for digit in range(3) for n in range(10, 50)} - kept


# --------------------------------------------------------------------------------------------- transcripts and batches


def test_transcripts_come_back_from_every_vocabulary(folder):
    text = "don't hello"
    for argv in ([], ["--train_tokenizer", "262"], ["--tokenizer", "words", "--train_tokenizer", "9"]):
        for ctc in (False, True):
            tokenizer = make_tokenizer(arguments(folder, *argv)[0], lambda: iter([text, text]), ctc)
            ids = tokenizer(text, add_special_tokens=not ctc)["input_ids"]
            options = {"group_tokens": False} if ctc else {}
            assert tokenizer.decode(ids, skip_special_tokens=True, **options) == text
            if ctc:  # as the network writes it
                written = [token for one in ids for token in (one, one, tokenizer.pad_token_id)]
                assert tokenizer.decode(written, skip_special_tokens=True) == text


def test_letters_said_twice_stay_two(tmp_path):
    """Also by the tokenizer of Wav2Vec2, which drops the blanks before it merges."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "|": 4, "h": 5, "e": 6, "l": 7, "o": 8}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    said = torch.tensor([[5, 5, 6, 7, 7, 0, 7, 8, 4, 8]])
    written = read_ctc(torch.nn.functional.one_hot(said, 9).float(), torch.tensor([10]), blank=0)
    assert decode(Wav2Vec2CTCTokenizer(tmp_path / "vocab.json"), written) == ["hello o"]


def test_a_model_gets_a_mask_only_if_its_extractor_returns_one():
    """What the extractor of a waveform says is what the model was pretrained with; others have no such choice."""
    extractors = [Wav2Vec2FeatureExtractor(return_attention_mask=masked) for masked in (False, True)]
    unread = []
    for extractor in (*extractors, WhisperFeatureExtractor(), Speech2TextFeatureExtractor(return_attention_mask=False)):
        trainer = object.__new__(speech.SpeechTrainer)
        trainer.data_collator = SpeechBatches(extractor)
        unread.append(trainer.unread)
    assert unread == [{"attention_mask"}, set(), set(), set()]


@pytest.mark.parametrize(
    ("config", "masked"),
    [
        (Wav2Vec2Config(feat_extract_norm="group"), False),
        (Wav2Vec2Config(feat_extract_norm="layer"), True),
        (Data2VecAudioConfig(), True),  # which has no such norm
    ],
)
def test_a_model_of_waveforms_from_scratch_has_an_extractor(config, masked):
    args = SimpleNamespace(model="no/folder", from_scratch=["hidden_size=8"])
    assert load_extractor(args, config).return_attention_mask is masked


@pytest.mark.parametrize("kind", [ParakeetFeatureExtractor, SeamlessM4TFeatureExtractor, Wav2Vec2FeatureExtractor])
def test_frames_are_counted_as_the_model_gets_them(kind):
    try:
        extractor = kind()
    except ImportError as error:  # Parakeet's asks for librosa in earlier transformers
        pytest.skip(str(error))
    noise = np.random.default_rng(0).normal(0, 0.1, (2, 2 * RATE)).astype(np.float32)
    waves = [noise[0], noise[1, :-4321]]
    options = {"sampling_rate": RATE, "padding": True, "return_attention_mask": True, "return_tensors": "np"}
    found = extractor(waves, **options)["attention_mask"].sum(1)
    counted = count_frames(extractor, torch.tensor([len(wave) for wave in waves]))
    np.testing.assert_allclose(counted.numpy(), found, atol=2)  # what a window holds more than its hop


def test_rows_held_out_are_no_copies_and_not_hidden(folder, tmp_path, monkeypatch):
    parts, fit = {}, speech.fit

    def fit_and_keep(args, training_args, model, tokenizer, data, **options):
        parts.update(data)
        return fit(args, training_args, model, tokenizer, data, **options)

    monkeypatch.setattr(speech, "fit", fit_and_keep)
    record = train(tmp_path, folder, CTC, "--held_out", "0.25", "--speeds", "0.9", "1", "1.1")
    assert record["rows"] == {"train": 27, "validation": 3}
    assert list(parts["validation"]["training"]) == [False] * 3
    assert list(parts["train"]["training"]) == [True] * 27


def test_no_sentence_is_both_in_training_and_held_out(folder):
    """Whatever its punctuation, in parts that are missing and in what is held out to tune by."""
    spellings = ("{}", "{}!", "{}.")
    texts = [spelling.format(text) for text in ("low", "mid", "high", "low mid", "") for spelling in spellings]
    write(folder, [(f"audio/{i}.wav", text, "train") for i, text in enumerate(texts)])
    for argv in ([], ["--held_out", "0.3"]):
        parts, _ = read(arguments(folder, "--normalize", "words", *argv)[0])
        sentences = {part: {normalize(row["text"], "words") for row in rows} for part, rows in parts.items()}
        train_sentences = sentences.pop("train")
        assert sentences
        assert all(held_out and not held_out & train_sentences for held_out in sentences.values())
        assert "" in train_sentences, "an empty transcript is no sentence"


def test_long_transcripts_are_left_out_of_training_and_refused_elsewhere(
    tmp_path, folder, capsys, transformers_warnings
):
    rows = [(f"audio/{i}.wav", "low " * (100 if i == 3 else 1), "train") for i in range(9)]
    rows += [("audio/9.wav", "low", part) for part in ("dev", "test")]
    write(folder, rows)
    options = ("--ctc_weight", "0", "--filter", "none", "--save_strategy", "no")
    record = train(tmp_path, folder, WHISPER, *options)
    transformers_warnings.clear()  # of its own generation
    assert (record["rows"]["train"], record["left_out"]) == (8, {"train_texts": 1})
    assert "train part: 1 of 9 transcripts have more than 300 tokens: left out" in capsys.readouterr().err
    write(folder, [*rows, ("audio/10.wav", "low " * 100, "test")])
    with pytest.raises(SystemExit):
        train(tmp_path / "other", folder, WHISPER, *options)
    assert "test part: 1 of 2 transcripts have more than 300 tokens, the most that" in capsys.readouterr().err
    all_long = {"train": Dataset.from_dict({"labels": [[5] * 9]})}
    with pytest.raises(GraphFilterError, match="train part: 1 of 1 transcripts have more than 8 tokens"):
        drop_long_texts(all_long, 8)


def test_what_a_model_cannot_do_is_said_before_features_are_made():
    def check(model_type="whisper", vocab_size=51865, ctc=False, **given):
        args = SimpleNamespace(**{"ctc_decode_weight": 0.0, "ctc_weight": None, "language": None, "model": "m"} | given)
        args.from_scratch = []
        check_model(args, SimpleNamespace(model_type=model_type, vocab_size=vocab_size), ctc)

    check(language="cs")
    check(vocab_size=51864)
    check(language="cs", ctc_decode_weight=0.4, ctc_weight=0.3)
    for wrong, message in (
        ({"language": "chzech"}, "knows no such language.*czech"),
        ({"language": "english", "vocab_size": 51864}, "knows English alone"),
        ({"language": "czech", "model_type": "wav2vec2"}, "does not take a language"),
        ({}, "m knows many languages: name that of the recordings"),
        ({"ctc_decode_weight": 0.4}, "needs a decoder with a CTC head"),
        ({"ctc_decode_weight": 0.4, "ctc": True, "model_type": "parakeet_ctc"}, "needs a decoder with a CTC head"),
    ):
        with pytest.raises(GraphFilterError, match=message):
            check(**wrong)


def test_unknown_characters_are_counted(folder, capsys):
    tokenizer = make_tokenizer(arguments(folder)[0], lambda: iter(["abc"]), False)
    rows = Dataset.from_dict({"text": ["abc", "xyz"]})
    encoded = encode(DatasetDict(test=rows), tokenizer, False, tokenizer.bos_token_id)["test"]
    assert encoded["labels"][1] == [tokenizer.unk_token_id] * 3 + [tokenizer.eos_token_id]
    assert "test part: 1 of 2 transcripts have characters or words outside the vocabulary" in capsys.readouterr().err


def test_normal_forms():
    assert normalize(" Don't  STOP, now! ", "none") == "Don't STOP, now!"
    assert normalize(" Don't  STOP, now! ", "lower") == "don't stop, now!"
    assert normalize(" Don't  STOP, now! ", "words") == "don't stop now"


def test_targets_that_do_not_fit_are_left_out(capsys):
    rows = Dataset.from_dict({"length": [8, 8, 8], "labels": [[5, 6], [5, 5], [5, 6, 2]]})
    kept, left_out = drop_long_targets(rows, torch.tensor(rows["length"]) // 4, special={2})
    assert kept["labels"] == [[5, 6], [5, 6, 2]]
    assert left_out == 1
    assert "1 of 3 transcripts are longer than the encoder's output" in capsys.readouterr().err


def test_batches_are_padded_and_only_training_rows_are_hidden():
    extractor = Speech2TextFeatureExtractor(feature_size=20, num_mel_bins=20)
    frames = [np.full((n, 20), n, np.float16) for n in (30, 50)]
    rows = [{"audio": one.tobytes(), "labels": [3] * i, "training": False} for i, one in enumerate(frames, 1)]
    batch = SpeechBatches(extractor)(rows)
    assert batch["input_features"].shape == (2, 50, 20)
    assert batch["attention_mask"].sum(1).tolist() == [30, 50]
    assert batch["labels"].tolist() == [[3, -100], [3, 3]]
    assert (batch["input_features"][1] == 50).all()
    torch.manual_seed(0)
    hidden = SpeechBatches(extractor)([{**row, "training": True} for row in rows])["input_features"][1] == 0
    assert 0 < hidden.sum() < hidden.numel()
    assert hidden.all(0).sum() <= 2 * 10
    assert hidden.all(1).sum() <= 2 * 10


@pytest.mark.parametrize("kind", [ParakeetFeatureExtractor, SeamlessM4TFeatureExtractor, WhisperFeatureExtractor])
def test_features_of_an_extractor_are_hidden_in_training(kind):
    """In frames of 10 ms, of which SeamlessM4T has two in one; padding stays as it is."""
    try:
        extractor = kind(**({"chunk_length": 3} if kind is WhisperFeatureExtractor else {}))
    except ImportError as error:  # Parakeet's asks for librosa in earlier transformers
        pytest.skip(str(error))
    noise = np.random.default_rng(0).normal(0, 0.1, (2, 2 * RATE)).astype(np.float32)
    waves = [to_integers(wave).tobytes() for wave in (noise[0], noise[1, : RATE // 2])]
    rows = [{"audio": wave, "labels": [3], "training": False} for wave in waves]
    collate = SpeechBatches(extractor, time_masks=1, time_width=9, frequency_masks=1, frequency_width=5)
    whole = collate(rows)["input_features"]
    torch.manual_seed(0)
    hidden = collate([{**row, "training": True} for row in rows])["input_features"]
    for before, after, seconds in zip(whole, hidden, (2, 0.5), strict=True):
        changed = (before != after).mT if kind is WhisperFeatureExtractor else before != after
        changed = changed.reshape(-1, 80)
        times = changed.all(1)
        frequencies = changed[: round(100 * seconds) - 4][~times[: round(100 * seconds) - 4]]
        assert 0 < times.sum() <= 9
        assert 0 < frequencies[0].sum() <= 5
        assert (frequencies == frequencies[0]).all()
        assert not changed[round(100 * seconds) + 1 :].any()


def test_batches_of_waveforms_are_made_by_the_extractor():
    wave = (tone("low") * 32767).astype(np.int16)
    row = {"audio": wave.tobytes(), "labels": [3], "training": True}
    batch = SpeechBatches(WhisperFeatureExtractor(chunk_length=1), time_masks=1)([row])
    assert batch["input_features"].shape == (1, 80, 100)
    assert "attention_mask" not in batch


def test_greedy_ctc_and_its_loss():
    ids = torch.tensor([[4, 4, 1, 4, 5, 5], [6, 1, 6, 6, 7, 7]])
    logits = torch.nn.functional.one_hot(ids, 8).float() * 20
    lengths = torch.tensor([6, 4])
    written = read_ctc(logits, lengths, blank=1)
    assert [[i for i in row if i != 1] for row in written.tolist()] == [[4, 4, 5], [6, 6]]
    labels = torch.tensor([[4, 4, 5, 2], [6, 6, 2, -100]])
    assert ctc_loss(logits, lengths, labels, {2}, blank=1) < 1e-3
    too_many = torch.tensor([[4] * 6, [6, 6, 2, -100, -100, -100]])
    assert ctc_loss(logits, lengths, too_many, {2}, blank=1).isfinite()


def test_error_rates_are_shares_of_the_reference():
    scores = metrics.score(("wer", "cer"), ["a b c", ""], ["a x c", "d"])
    assert scores == {"wer": 2 / 4, "cer": 2 / 6}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--normalize", "upper"], "--normalize upper: it is one of none, lower, words"),
        (["--ctc_weight", "2"], "--ctc_weight 2: it is from 0 to 1"),
        (["--speeds", "0"], "--max_seconds and --speeds are above 0"),
        (["--join_seconds", "-1"], "--join_seconds -1: it is 0 or more"),
        (["--time_masks", "-1"], "--time_masks -1: it is 0 or more"),
        (["--task", "digit"], "did you mean 'digits'"),
    ],
)
def test_wrong_settings_are_one_clear_error(argv, message, folder):
    with pytest.raises(GraphFilterError, match=message):
        arguments(folder, *argv)


SIZES_OF_STACKS = {"attention_heads": 2, "ffn_dim": 16}


def test_the_encoder_of_whisper_becomes_linear_by_the_batches_of_the_recipe():
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "max_source_positions": 50, "vocab_size": 40}
    sizes |= {f"{stack}_{name}": n for stack in ("encoder", "decoder") for name, n in SIZES_OF_STACKS.items()}
    ids = {"pad_token_id": 1, "decoder_start_token_id": 2, "eos_token_id": 2, "bos_token_id": 2}
    config = WhisperConfig(**sizes, **ids, suppress_tokens=None, begin_suppress_tokens=None)
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(config)
    draw = np.random.default_rng(0)
    rows = [{"audio": draw.integers(-9999, 9999, RATE, np.int16).tobytes(), "training": False} for _ in range(6)]
    collate = SpeechBatches(WhisperFeatureExtractor(chunk_length=1))
    batches = [collate([{**row, "labels": [5] * (2 + i)} for i, row in enumerate(rows)]) for _ in range(3)]
    given = inputs_of(model, batches[0], labels=False)
    expected = shift_tokens_right(batches[0]["labels"], 1, 2)
    assert given["decoder_input_ids"].tolist() == expected.tolist()
    report = linearize(model, batches, window=8, budget=2000, holdout=1, stack="encoder", progress=False)
    assert report.error < 1
    assert [row.module for row in filter_status(model)] == [f"model.encoder.layers.{i}.self_attn" for i in range(2)]


@pytest.mark.parametrize("prompt", [(1,), (1, 3, 3, 2)], ids=["start", "prompt"])
def test_joint_search_scores_a_beginning_by_all_alignments(prompt):
    """The CTC part, against sums over all paths of four positions and four tokens: blank, end, and two others."""
    torch.manual_seed(0)
    blank, end = 0, 1
    logits = torch.randn(2, 4, 4) * 2
    logits[..., end] = -30.0  # which CTC does not learn
    lengths, says = torch.tensor([4, 3]), logits.log_softmax(-1)

    def probability(row, text, whole):
        total = 0.0
        for path in itertools.product((0, 2, 3), repeat=int(lengths[row])):
            read = tuple(token for token, _ in itertools.groupby(path) if token != blank)
            if read == text if whole else read[: len(text)] == text:
                total += math.exp(sum(says[row, t, token].item() for t, token in enumerate(path)))
        return total

    search = JointSearch(logits, lengths, blank, end, weight=1.0)
    scores = torch.zeros(2, 4)
    for text in ((), (2,), (2, 2), (2, 2, 3)):
        ids = torch.tensor([[*prompt, *text]] * 2)
        joint = search(ids, scores)
        for row in range(2):
            begun = probability(row, text, whole=False)
            if text and begun == 0:
                continue
            assert joint[row, blank] < -1e5, "no text has a blank"
            assert joint[row, end].exp().item() == pytest.approx(probability(row, text, True) / begun, abs=1e-5)
            for token in (2, 3):
                expected = probability(row, (*text, token), whole=False) / begun
                assert joint[row, token].exp().item() == pytest.approx(expected, abs=1e-5)
