"""The flags of the recipes besides those of the Trainer, and the defaults of both."""

from dataclasses import dataclass

import torch
from transformers.hf_argparser import HfArg

from hf_graphfilter.training.optimizer import FILTER_LR

# of the recipes that have such flags
DEFAULTS = {
    "report_to": "none",
    "logging_steps": 50,
    "warmup_steps": 0,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "save_total_limit": 1,
    "restore_callback_states_from_checkpoint": True,  # how long early stopping has waited
    "dataloader_pin_memory": torch.cuda.is_available(),
}
# the names that some flags have in the example scripts of transformers
ALIASES = {
    "model_name_or_path": "model",
    "task_name": "task",
    "max_seq_length": "max_length",
    "tokenizer_name": "tokenizer",
    "dataset_dir": "data",
    "train_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
}
SMOKE = {
    "max_train_samples": 64,
    "max_eval_samples": 64,
    "max_steps": 4,
    "eval_strategy": "no",
    "save_strategy": "no",
    "load_best_model_at_end": False,
    "early_stopping_patience": None,
    "logging_steps": 1,
}


@dataclass
class FilterArguments:
    """The flags of every recipe."""

    model: str = HfArg(help="Hub id or folder; with --from_scratch also a model type such as gpt2.")
    task: str = HfArg(help="The task, see the top of this help.")
    data: str | None = HfArg(default=None, help="Folder with local files in the official format, instead of the Hub.")
    filter: str = HfArg(default="gfsa", help="A registered graph filter, or none.")
    filter_options: list[str] = HfArg(
        default_factory=list, help='Options of the filter, NAME=VALUE: K=4 \'learn=["w_0","w_K"]\'.'
    )
    filter_lr: float = HfArg(default=FILTER_LR, help="Learning rate of the filter coefficients.")
    layers: str = HfArg(default="all", help="Layers to patch: all, even, odd, 0,2,-1 or 2:8.")
    seeds: list[int] = HfArg(default_factory=lambda: [1], help="One run per seed.")
    max_train_samples: int | None = HfArg(default=None, help="Number of training rows, taken after a shuffle.")
    max_eval_samples: int | None = HfArg(default=None, help="Number of rows per evaluated part, from its start.")
    held_out: float = HfArg(default=0.0, help="Share of the training part to evaluate on instead, for tuning.")
    smoke: bool = HfArg(default=False, help="A few rows and steps, to see that everything works.")


@dataclass
class RecipeArguments(FilterArguments):
    """The flags of a text recipe, besides those of the Trainer."""

    tokenizer: str | None = HfArg(
        default=None, help="Hub id or folder, default: the model's; words: --train_tokenizer makes one of whole words."
    )
    train_tokenizer: int | None = HfArg(
        default=None, help="Train a byte-level BPE of this size on the training part; 261 entries are the bytes alone."
    )
    from_scratch: list[str] = HfArg(
        default_factory=list,
        help="Train from scratch, with these fields of the model's config, NAME=VALUE: n_layer=6 n_embd=320.",
    )
    max_length: int = HfArg(default=128, help="Maximum number of tokens; longer texts are cut.")
    early_stopping_patience: int | None = HfArg(default=None, help="Evaluations without improvement until a stop.")
    stride: int | None = HfArg(
        default=None, help="Language models: step of the sliding window; half of --max_length if not given."
    )


@dataclass
class GlueArguments(RecipeArguments):
    """The further flags of the recipe for GLUE and your own texts."""

    dataset_name: str | None = HfArg(default=None, help="Data set of the Hub, OWNER/NAME, for texts and ratings.")
    dataset_config_name: str | None = HfArg(default=None, help="Configuration of --dataset_name.")


@dataclass
class SequenceArguments(RecipeArguments):
    """The further flags of the recipe for sequences."""

    pooling: str | None = HfArg(
        default=None,
        help="Use a head over all tokens instead of the model's own: mean_max, mean, first or flatten (concatenated).",
    )
    positions: str | None = HfArg(
        default=None, help="With --pooling: gru, sinusoidal or none, instead of the encoder's learned positions."
    )
    embedding_dropout: float | None = HfArg(
        default=None, help="With --pooling: dropout of the embeddings; default: as in the layers."
    )
    validation: str = HfArg(
        default="auto",
        help="Part to validate on: fold (a fifth of the training part, the Nth for seed N), none, test (the test part; "
        "scores are then its best), or auto (the data set's own part, or else a fold).",
    )
    pretrain: str | None = HfArg(default=None, help="denoise: first learn to restore hidden parts of the inputs.")
    pretrain_epochs: float = HfArg(default=10.0, help="Epochs of --pretrain.")
    pretrain_lr: float | None = HfArg(default=None, help="Learning rate of --pretrain; default: that of the training.")
    mask_ratio: float = HfArg(default=0.5, help="Share of the input that --pretrain hides.")


@dataclass
class CodeArguments(RecipeArguments):
    """The further flags of the recipe for source code."""

    pairs: str = HfArg(
        default="together",
        help="How clones are read: together (both in one sequence of --max_length tokens), or apart (each alone, as in "
        "the paper).",
    )


@dataclass
class GraphArguments(FilterArguments):
    """The flags of the recipe for graphs, besides those of the Trainer."""

    from_scratch: list[str] = HfArg(
        default_factory=list, help="Fields of the model's config as NAME=VALUE: num_hidden_layers=4 hidden_size=64."
    )
    target: str | None = HfArg(default=None, help="Column to predict; separate several by commas.")
    split: str | None = HfArg(
        default=None,
        help="How to split: given (the column split, or the official split), random, or scaffold (molecules with the "
        "same Murcko scaffold stay together); default: the usual split of the task.",
    )
    bad_graphs: str = HfArg(default="skip", help="skip (and count) graphs that cannot be read, or error.")
    standardize: bool | None = HfArg(default=None, help="Predict standardised targets; default: as usual for the task.")
    early_stopping_patience: int | None = HfArg(default=None, help="Evaluations without improvement until a stop.")


@dataclass
class SpeechArguments(FilterArguments):
    """The flags of the recipe for speech, besides those of the Trainer."""

    tokenizer: str | None = HfArg(
        default=None,
        help="characters (of the training part; the default from scratch), words, or a Hub id or folder.",
    )
    train_tokenizer: int | None = HfArg(
        default=None, help="Train a byte-level BPE (or --tokenizer words) of so many entries; 261 are the bytes alone."
    )
    from_scratch: list[str] = HfArg(
        default_factory=list, help="No pretrained weights; fields of the model's config as NAME=VALUE."
    )
    language: str | None = HfArg(default=None, help="Spoken language, for multilingual Whisper: czech or cs.")
    normalize: str = HfArg(
        default="none", help="Transcripts: none (as they are), lower, or words (lower, without punctuation)."
    )
    ctc_weight: float | None = HfArg(
        default=None, help="Weight of CTC in an encoder-decoder's loss; default: 0.3 from scratch, otherwise 0."
    )
    ctc_decode_weight: float = HfArg(default=0.0, help="Weight of CTC in the search, if the decoder has a CTC head.")
    max_seconds: float = HfArg(default=30.0, help="Longest recording, in seconds.")
    too_long: str = HfArg(default="skip", help="skip (and count) longer recordings, or cut them.")
    join_seconds: float = HfArg(
        default=0.0, help="Join neighbouring training recordings up to this length; 30 suits Whisper, 0 joins none."
    )
    bad_audio: str = HfArg(default="skip", help="skip (and count) what cannot be used, or error.")
    speeds: list[float] = HfArg(
        default_factory=lambda: [1.0], help="Speeds of the training part; 0.95 1 1.05 are three copies of it."
    )
    time_masks: int = HfArg(
        default=2, help="SpecAugment: number of hidden stretches of frames. Models of waveforms use their config."
    )
    time_width: int = HfArg(default=40, help="Largest width of such a stretch in frames; at most a fifth of all.")
    frequency_masks: int = HfArg(default=2, help="SpecAugment: number of hidden stretches of frequencies.")
    frequency_width: int = HfArg(default=27, help="Largest width of such a stretch, in frequencies.")
    early_stopping_patience: int | None = HfArg(default=None, help="Evaluations without improvement until a stop.")


@dataclass
class ImageArguments(FilterArguments):
    """The flags of the recipe for images; the defaults are those of DeiT, also used for DeiT in the GFSA paper."""

    output_dir: str | None = None
    seed: int = 1
    pretrained: bool = HfArg(default=False, help="Start from the pretrained weights.")
    checkpoint: str | None = HfArg(default=None, help="Start from this file of weights (timm).")
    model_options: list[str] = HfArg(
        default_factory=list, help="Options of timm.create_model (depth=24 ...) or fields of a transformers config."
    )
    img_size: int | None = HfArg(default=None, help="Image size in pixels; default: that of the model.")
    epochs: float = 300.0
    max_steps: int | None = HfArg(default=None, help="Optimizer steps; instead of --epochs.")
    batch_size: int = HfArg(default=1024, help="Images per step, over all devices.")
    device_batch_size: int = HfArg(default=128, help="Images at a time per device; gradients accumulate to a step.")
    eval_batch_size: int = 128
    learning_rate: float = 1e-3
    min_lr: float = 1e-5
    warmup_epochs: float = 5.0
    warmup_lr: float = 1e-6
    weight_decay: float = 0.05
    layer_decay: float | None = HfArg(default=None, help="Factor of the learning rate from layer to layer.")
    max_grad_norm: float | None = None
    drop_path: float = 0.1
    drop: float = HfArg(default=0.0, help="Dropout of positions, attention outputs and feed-forward layers.")
    auto_augment: str | None = "rand-m9-mstd0.5-inc1"
    color_jitter: float = 0.3
    random_erasing: float = 0.25
    mixup: float = 0.8
    cutmix: float = 1.0
    smoothing: float = 0.1
    repeated_augmentation: int = HfArg(default=3, help="Times an image is seen, on several devices; 0: off.")
    crop_scale: float = HfArg(default=0.08, help="Smallest part of an image that a crop keeps; 1: no augmentation.")
    interpolation: str = "bicubic"
    ema_decay: float = HfArg(default=0.0, help="Decay of an average of the weights, to evaluate and save; 0: none.")
    precision: str = HfArg(default="no", help="no, bf16 or fp16.")
    compile: bool = False
    workers: int = 8
    bad_images: str = HfArg(default="skip", help="skip (and count) images that cannot be read, or error.")
    use_cpu: bool = False
    report_to: str = "none"
    logging_steps: int = 50
    save_strategy: str = HfArg(default="epoch", help="epoch, or no: only the numbers.")
    disable_tqdm: bool = False
    push_to_hub: bool = False
    hub_model_id: str | None = None
    hub_token: str | None = None
    hub_private_repo: bool | None = None
