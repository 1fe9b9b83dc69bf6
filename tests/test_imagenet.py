"""The image recipe, on small images made here."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from processes import run_two

from hf_graphfilter import GraphFilterError, filter_status, load_timm_model
from recipes import compare, runs
from recipes.settings import Settings

pytest.importorskip("timm")
from PIL import Image
from transformers import (
    AutoModelForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    pipeline,
)

from recipes import image_data, image_models, imagenet

MODEL = ["--model", "vit_tiny_patch16_224", "--img_size", "32", "--drop_path", "0", "--mixup", "0", "--cutmix", "0"]
MODEL += ["--model_options", "depth=2", "embed_dim=24", "num_heads=2", "patch_size=8", "--task", "folder"]
MODEL += ["--auto_augment", "", "--random_erasing", "0", "--color_jitter", "0", "--repeated_augmentation", "0"]
SHORT = ["--workers", "0", "--batch_size", "8", "--device_batch_size", "8", "--warmup_epochs", "0", "--epochs", "2"]
SHORT += ["--use_cpu", "--disable_tqdm", "--learning_rate", "1e-3"]


@pytest.fixture
def data(tmp_path):
    """Red and blue images."""
    g = torch.Generator().manual_seed(0)
    for part, count in (("train", 16), ("val", 6)):
        for name, channel in (("blue", 2), ("red", 0)):
            folder = tmp_path / "data" / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = torch.randint(0, 120, (32, 32, 3), generator=g, dtype=torch.uint8)
                pixels[..., channel] += 120
                Image.fromarray(pixels.numpy()).save(folder / f"{i}.png")
    return tmp_path / "data"


def run(data, folder, *more):
    argv = [*MODEL, *SHORT, "--data", data, "--output_dir", folder, *more]
    runs.main(imagenet.RECIPE, [*map(str, argv)])
    return json.loads((folder / "seed-1" / "record.json").read_text())


@pytest.mark.parametrize("options", [["--filter", "none"], [], ["--filter", "agf", "--layers", "-1"]])
def test_a_run_is_recorded_saved_and_loaded(options, data, tmp_path):
    found = run(data, tmp_path / "run", *options, "--filter_lr", "0.05")
    assert found["steps"] == 8
    assert set(found["metrics"]) == {"validation/accuracy", "validation/top5", "validation/loss"}
    assert found["metrics"]["validation/top5"] == 1.0, "of two classes"
    assert found["skipped_images"] == 0
    card = (tmp_path / "run" / "seed-1" / "README.md").read_text()
    assert "| folder | validation | accuracy |" in card or "--filter" in options
    assert "library_name: timm" in card
    assert "type: image-classification" in card
    assert "base_model" not in card, "from scratch"
    if not options:
        assert found["filter_parameters"] == 4
        assert found["moved"]["w_K"] > 0.03
        model = load_timm_model(tmp_path / "run" / "seed-1")
        assert [row.coefficients["w_K"].mean().item() for row in filter_status(model)] == pytest.approx(
            found["coefficients"]["w_K"], abs=1e-6
        )
        with torch.no_grad():
            images = torch.zeros(1, 3, 32, 32)
            assert model(images).shape == (1, 2)


@pytest.fixture
def vit(tmp_path):
    """A folder with a model of transformers."""
    shape = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = ViTForImageClassification(ViTConfig(**shape, image_size=32, patch_size=8, num_labels=7))
    model.save_pretrained(tmp_path / "tiny-vit")
    ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.4] * 3).save_pretrained(tmp_path / "tiny-vit")
    return tmp_path / "tiny-vit"


@pytest.mark.parametrize(
    "options", [["--filter", "none"], [], ["--filter", "agf", "--layers", "-1", "--filter_options", "init=blend"]]
)
def test_models_of_transformers(options, data, vit, tmp_path, transformers_warnings):
    more = ["--model", vit, "--img_size", "32", "--model_options", "layer_norm_eps=1e-6", "--pretrained"]
    more += ["--epochs", "6", "--learning_rate", "5e-3", "--ema_decay", "0.5"]
    found = run(data, tmp_path / "run", *more, *options)
    assert all("classifier.weight" in m and "vit." not in m for m in transformers_warnings), "a new head only"
    transformers_warnings.clear()
    assert found["metrics"]["validation/accuracy"] == 1.0
    assert found["settings"]["model"] == "tiny-vit"
    folder = tmp_path / "run" / "seed-1"
    model = AutoModelForImageClassification.from_pretrained(folder)
    assert model.config.id2label == {0: "blue", 1: "red"}
    assert model.config.layer_norm_eps == 1e-6
    assert len(filter_status(model)) == (0 if "none" in options else 1 if "--layers" in options else 2)
    if "agf" in options:
        assert (filter_status(model)[0].coefficients["gate"] == 1).all(), "of the average too"
    assert list(ViTImageProcessor.from_pretrained(folder).image_mean) == [0.4] * 3
    card = (folder / "README.md").read_text()
    assert "library_name: transformers" in card
    assert "type: image-classification" in card
    classify = pipeline("image-classification", model=model, image_processor=ViTImageProcessor.from_pretrained(folder))
    assert classify(Image.open(data / "val" / "red" / "0.png"))[0]["label"] == "red"


def test_a_config_of_transformers_from_scratch(data, vit, tmp_path):
    more = ["--model", vit, "--img_size", "16", "--model_options", "num_hidden_layers=3", "--drop", "0.1"]
    assert run(data, tmp_path / "run", *more, "--epochs", "1")["filter_parameters"] == 3 * 2
    folder = tmp_path / "run" / "seed-1"
    assert ViTImageProcessor.from_pretrained(folder).size["height"] == 16
    settings = Settings(imagenet.RECIPE)
    values, _ = settings.parse([*MODEL, *SHORT, "--model", str(vit), "--model_options", "num_hidden_layers=3"])
    (args,) = settings.arguments(values)
    model, _ = image_models.build(args, ["blue", "red"])
    undecayed = {id(p) for g in imagenet.optimizer_of(args, model).param_groups[:1] for p in g["params"]}
    assert id(model.vit.embeddings.position_embeddings) in undecayed
    assert id(model.vit.embeddings.cls_token) in undecayed


@pytest.mark.parametrize("more", [[], ["--pretrained"]])
def test_a_checkpoint_in_half_precision_trains_in_float32(more, vit, transformers_warnings):
    ViTForImageClassification.from_pretrained(vit).half().save_pretrained(vit)
    settings = Settings(imagenet.RECIPE)
    values, _ = settings.parse([*MODEL, "--model", str(vit), "--model_options", "layer_norm_eps=1e-6", *more])
    model, _ = image_models.build(*settings.arguments(values), ["blue", "red"])
    transformers_warnings.clear()  # of the head, which is new
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--layer_decay", "0.9"], "--layer_decay is for models of timm"),
        (["--checkpoint", "x.safetensors"], "--checkpoint is for models of timm"),
        (["--img_size", "48", "--pretrained"], "are for 32 pixels; leave it out"),
        (["--drop_path", "0.1"], "has no drop_path_rate (0.1); use --drop_path 0"),
        (["--model_options", "dephth=2"], "has no dephth (2)"),
        (["--pretrained", "--model_options", "intermediate_size=16"], "of them would be random (vit."),
        (["--pretrained", "--model_options", "num_hidden_layers=3"], "of them would be random (vit."),
        (["--model", "no/such-model"], "no/such-model cannot be loaded"),
    ],
)
def test_what_a_model_of_transformers_does_not_take_is_one_line(
    more, message, data, vit, tmp_path, capsys, transformers_warnings
):
    base = ["--model", vit, "--model_options", "layer_norm_eps=1e-6", "--img_size", "32"]
    with pytest.raises(SystemExit):
        run(data, tmp_path / "run", *base, *more)
    transformers_warnings.clear()
    assert message in " ".join(capsys.readouterr().err.split())


def test_as_many_images_as_asked_for(data, tmp_path):
    some = ["--max_train_samples", "24", "--max_eval_samples", "5"]
    assert run(data, tmp_path / "short", *some, "--epochs", "0.01")["steps"] == 1
    found = run(data, tmp_path / "run", *some, "--epochs", "1")
    assert found["steps"] == 3
    assert found["metrics"]["validation/accuracy"] * 5 == pytest.approx(
        round(found["metrics"]["validation/accuracy"] * 5)
    )


def test_colours_are_learned_with_averaged_weights_and_accumulation(data, tmp_path):
    more = ["--epochs", "8", "--device_batch_size", "4", "--ema_decay", "0.9", "--learning_rate", "3e-3"]
    found = run(data, tmp_path / "run", *more, "--layer_decay", "0.9", "--max_grad_norm", "1", "--save_strategy", "no")
    assert found["steps"] == 32
    assert found["metrics"]["validation/accuracy"] == 1.0
    assert "validation/last_accuracy" in found["metrics"]


def test_steps_are_of_as_many_images_as_asked_for(data, tmp_path):
    """The default of a device, 128, is more."""
    found = run(data, tmp_path / "run", "--batch_size", "4", "--device_batch_size", "128", "--epochs", "1")
    assert found["steps"] == 8


def test_an_epoch_without_a_whole_step_is_refused(data, tmp_path, monkeypatch, capsys):
    """As of repeated augmentation on several devices, whose sampler rounds the number of images down."""

    class Batches(list):
        batch_size = 4

    monkeypatch.setattr(imagenet, "loaders", lambda *args: (Batches([1]), None))
    with pytest.raises(SystemExit):
        run(data, tmp_path / "run")
    assert "the 1 batches per epoch make no step: give --repeated_augmentation 0" in capsys.readouterr().err


def test_an_interrupted_run_goes_on(data, tmp_path, monkeypatch):
    whole = run(data, tmp_path / "whole", "--mixup", "0.8")
    original = imagenet.save_state

    def stop(accelerator, folder, average, step):
        original(accelerator, folder, average, step)
        raise KeyboardInterrupt

    monkeypatch.setattr(imagenet, "save_state", stop)
    with pytest.raises(SystemExit):
        run(data, tmp_path / "broken", "--mixup", "0.8")
    begun = []
    monkeypatch.setattr(imagenet, "save_state", lambda *args: begun.append(args[3]))
    again = run(data, tmp_path / "broken", "--mixup", "0.8")
    assert begun == [8], "the second epoch only"
    assert again["metrics"] == whole["metrics"]
    assert again["coefficients"] == whole["coefficients"]


@pytest.mark.slow
def test_two_processes_share_the_work(data, tmp_path):
    argv = [*MODEL, *SHORT, "--data", data, "--output_dir", tmp_path / "run", "--device_batch_size", 4]
    run_two(imagenet.__file__, *argv)
    found = json.loads((tmp_path / "run" / "seed-1" / "record.json").read_text())
    assert found["steps"] == 8, "32 images, 4 on each of two devices, two epochs"
    assert found["metrics"]["validation/accuracy"] * 12 == pytest.approx(
        round(found["metrics"]["validation/accuracy"] * 12)
    ), "each of the 12 validation images once"
    assert len(filter_status(load_timm_model(tmp_path / "run" / "seed-1"))) == 2


def test_runs_of_one_process_have_each_their_precision():
    settings = Settings(imagenet.RECIPE)
    for precision in ("bf16", "no"):
        values, _ = settings.parse([*MODEL, *SHORT, "--precision", precision])
        (args,) = settings.arguments(values)
        assert imagenet.accelerator_of(args).mixed_precision == precision


def test_the_filter_has_a_learning_rate_of_its_own(data):
    settings = Settings(imagenet.RECIPE)
    for more in ([], ["--layer_decay", "0.5"]):
        values, _ = settings.parse([*MODEL, *SHORT, "--filter_lr", "0.03", *more])
        (args,) = settings.arguments(values)
        model, _ = image_models.build(args, ["blue", "red"])
        groups = imagenet.optimizer_of(args, model).param_groups
        assert (groups[-1]["lr"], groups[-1]["weight_decay"], len(groups[-1]["params"])) == (0.03, 0.0, 2)
        counted = [id(p) for group in groups for p in group["params"]]
        assert len(counted) == len(set(counted)) == len(list(model.parameters()))


def test_plain_and_filter_are_compared_over_the_same_seeds(data, tmp_path):
    argv = [
        *MODEL,
        *SHORT,
        "--data",
        data,
        "--output_dir",
        tmp_path / "run",
        "--results",
        tmp_path,
        "--save_strategy",
        "no",
    ]
    compare.main(["imagenet", *map(str, argv), "--seeds", "1", "2"])
    found = json.loads((tmp_path / "imagenet-folder.json").read_text())
    assert found["summary"]["gfsa"]["difference"]["pairs"] == 2


def test_images_that_cannot_be_read_are_skipped_and_counted_or_an_error(data, tmp_path, capsys, monkeypatch):
    (data / "train" / "red" / "3.png").write_bytes(b"no image")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50_000)
    Image.new("RGB", (400, 400)).save(data / "train" / "red" / "5.png")  # of too many pixels
    found = run(data, tmp_path / "run", "--save_strategy", "no")
    assert found["skipped_images"] == 2, "however often they were asked for"
    (data / "train" / "red" / "5.png").unlink()
    with pytest.raises(SystemExit):
        run(data, tmp_path / "strict", "--bad_images", "error")
    assert "red/3.png cannot be read as an image; --bad_images skip" in capsys.readouterr().err


def test_what_stands_for_a_bad_image_is_of_its_part(data):
    images = image_data.Images(data / "train", "skip")
    kept, out = image_data.hold_out(images, 0.25)
    broken = next(i for i in kept.indices if i + 1 in out.indices)
    Path(images.filename(broken, absolute=True)).write_bytes(b"no image")
    for _ in range(20):  # epochs
        found = kept[kept.indices.index(broken)][0].tobytes()
    assert found in [image.tobytes() for image, _ in (kept[i] for i in range(len(kept)))]
    assert found not in [image.tobytes() for image, _ in (out[i] for i in range(len(out)))]
    assert int(images.bad.sum()) == 1
    for i in kept.indices:
        Path(images.filename(i, absolute=True)).write_bytes(b"no image")
    with pytest.raises(GraphFilterError, match="more than a tenth of the images cannot be read"):
        [kept[i] for i in range(len(kept))]


def test_the_usual_augmentation_of_many_images(data, tmp_path):
    """Among them the strongest posterising."""
    images, others = (image_data.Images(data / part, "error") for part in ("train", "val"))
    settings = Settings(imagenet.RECIPE)
    values, _ = settings.parse([*MODEL, *SHORT, "--data", str(data), "--auto_augment", "rand-m10-mstd0.5-inc1-n8"])
    (args,) = settings.arguments(values)
    config = {
        "input_size": (3, 32, 32),
        "mean": (0.5,) * 3,
        "std": (0.5,) * 3,
        "crop_pct": 1.0,
        "interpolation": "bicubic",
    }
    train, _ = image_data.loaders(args, imagenet.accelerator_of(args), config, images, others)
    assert all(batch.isfinite().all() for _ in range(12) for batch, _ in train)


def test_an_image_that_cannot_be_read_counts_for_nothing(data, tmp_path):
    """In evaluations; in training its neighbour stands for it."""
    accuracies = []
    for leave_out in (False, True):
        for name in ("0.png", "1.png"):
            file = data / "val" / "red" / name
            file.unlink() if leave_out else file.write_bytes(b"no image")
        found = run(data, tmp_path / f"run-{leave_out}")
        accuracies.append({k: v for k, v in found["metrics"].items() if k.startswith("validation/")})
        assert found["skipped_images"] == (0 if leave_out else 2)
    assert accuracies[0] == pytest.approx(accuracies[1])


def test_images_outside_of_class_folders_are_named(data, capsys):
    (data / "train" / "red" / "deeper").mkdir()
    (data / "train" / "red" / "0.png").rename(data / "train" / "red" / "deeper" / "0.png")
    settings = Settings(imagenet.RECIPE)
    values, _ = settings.parse([*MODEL, *SHORT, "--data", str(data)])
    image_data.load(settings.arguments(values)[0])
    assert "1 images lie in no class folder, or in folders below one" in capsys.readouterr().err


def empty(folder):
    for file in folder.iterdir():
        file.unlink()


@pytest.mark.parametrize(
    ("break_it", "more", "message"),
    [
        (lambda d: empty(d / "val" / "red"), [], "red holds no images"),
        (None, ["--bad_images", "raise"], "--bad_images 'raise': it is one of skip, error"),
        (None, ["--save_strategy", "steps"], "--save_strategy 'steps': it is one of epoch, no"),
        (None, ["--interpolation", "foo"], "--interpolation 'foo': it is one of bicubic"),
        (None, ["--max_eval_samples", "-1"], "--max_eval_samples -1: a number at least 1 is needed"),
        (None, ["--logging_steps", "0"], "--logging_steps 0: a number at least 1 is needed"),
        (None, ["--epochs", "0"], "--epochs 0: a number above 0 is needed"),
        (None, ["--filter_lr", "-1"], "--filter_lr -1: a number at least 0 is needed"),
        (None, ["--workers", "-1"], "--workers -1: a number at least 0 is needed"),
        (None, ["--smoothing", "2"], "--smoothing 2: a number from 0 to 1 is needed"),
        (None, ["--auto_augment", "foo", "--crop_scale", "0.5"], "--auto_augment foo: timm cannot make these"),
        (None, ["--report_to", "foo"], "--report_to foo"),
        (lambda d: (d / "val" / "red").rename(d / "val" / "green"), [], "green is in one only"),
        (
            lambda d: [shutil.rmtree(d / part / "red") for part in ("train", "val")],
            [],
            "train needs two class folders at least, and has 1",
        ),
        (lambda d: (d / "val").rename(d / "other"), [], "needs folders train and val"),
        (None, ["--data", "nowhere"], "there is no folder nowhere"),
        (None, ["--model_options", "img_size=64"], "use --img_size"),
        (None, ["--img_size", "30"], "--img_size 30: vit_tiny_patch16_224 cuts images into patches of 8 pixels"),
        (None, ["--model_options", "dephth=2"], "timm cannot make vit_tiny_patch16_224"),
        (None, ["--model", "vit_tinny_patch16_224"], r"timm cannot make vit_tinny_patch16_224 (did you mean 'vit_tiny"),
        (None, ["--precision", "int4"], "it is one of no, bf16, fp16"),
        (None, ["--batch_size", "64", "--device_batch_size", "64"], "are less than a step's"),
        (None, ["--batch_size", "64"], "training images are less than a step's: give a smaller --batch_size"),
        (None, ["--device_batch_size", "1", "--mixup", "0.8"], "and 1 at a time are odd"),
        (
            None,
            ["--warmup_epochs", "2"],
            "--warmup_epochs 2 leaves the learning rate rising to the end",
        ),
        (None, ["--device_batch_size", "3"], "--batch_size 8 cannot be made of 3 images at a time on 1 device"),
        (None, ["--model", "resnet18", "--model_options", "block_args=null"], "has no self-attention to patch"),
    ],
)
def test_bad_input_is_one_line(break_it, more, message, data, tmp_path, capsys):
    if break_it:
        break_it(data)
    if "resnet18" in more:
        more = [*more, "--img_size", "0"]
    with pytest.raises(SystemExit) as stopped:
        run(data, tmp_path / "run", *more)
    assert stopped.value.code == 1
    assert message in capsys.readouterr().err


def test_data_of_the_hub_that_cannot_be_loaded_is_one_line():
    settings = Settings(imagenet.RECIPE)
    values, _ = settings.parse([*MODEL, *SHORT, "--task", "imagenet-1k"])
    with pytest.raises(GraphFilterError, match=r"cannot be loaded .* name a folder with --data"):
        image_data.load(settings.arguments(values)[0])
