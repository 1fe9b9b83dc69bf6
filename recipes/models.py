"""Models and tokenizers: loaded or made, and patched with the filter."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from tokenizers import ByteLevelBPETokenizer, Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import WordLevel
from tokenizers.trainers import WordLevelTrainer
from transformers import CONFIG_MAPPING, PreTrainedModel, PreTrainedTokenizerFast, Seq2SeqTrainingArguments, set_seed

from hf_graphfilter import GraphFilterError, patch_model
from hf_graphfilter.checkpoints.tokenizer import knows_words
from hf_graphfilter.console import parse_options
from hf_graphfilter.errors import nearest, shown
from hf_graphfilter.hosts.transformers.records import model_class
from recipes.arguments import FilterArguments, RecipeArguments
from recipes.errors import line, mark_refusals

MARKS = pre_tokenizers.BertPreTokenizer()  # punctuation marks are words
SPACES = pre_tokenizers.WhitespaceSplit()


def load_tokenizer(args: RecipeArguments, texts: Callable[[], Iterator[str]], split: Any = MARKS) -> Any:
    """Return the model's tokenizer, another one, or a byte-level BPE or one of words trained on ``texts()``.

    ``split`` says where a word ends.
    """
    if args.train_tokenizer:
        if args.train_tokenizer <= len(SPECIAL):
            raise GraphFilterError(
                f"--train_tokenizer {args.train_tokenizer}: a vocabulary has {len(SPECIAL)} special tokens and others"
            )
        if args.tokenizer == "words":
            return train_words(texts(), args.train_tokenizer, split)
        return train_bpe(texts(), args.train_tokenizer)
    source, kind = args.tokenizer or args.model, transformers.AutoTokenizer
    with loading_errors(source):
        if Path(source, "vocab.json").is_file() and not Path(source, "tokenizer_config.json").is_file():
            # a bare byte-level BPE does not say whose it is; its special tokens do
            roberta = "<s>" in json.loads(Path(source, "vocab.json").read_text())
            kind = transformers.RobertaTokenizerFast if roberta else transformers.GPT2TokenizerFast
        tokenizer = kind.from_pretrained(source)
    if not knows_words(tokenizer):
        raise GraphFilterError(f"{source} has no tokenizer: name one with --tokenizer, say that of the original model")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


SPECIAL = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}  # RoBERTa's


def train_bpe(texts: Iterator[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with RoBERTa's special tokens on ``texts``."""
    bpe = ByteLevelBPETokenizer()
    options = {"special_tokens": [*SPECIAL.values()], "show_progress": False}
    bpe.train_from_iterator(texts, vocab_size=vocabulary, min_frequency=2, **options)
    return with_special_tokens(bpe._tokenizer)


def train_words(texts: Iterator[str], vocabulary: int, split: Any = MARKS) -> PreTrainedTokenizerFast:
    """Train a tokenizer of the most frequent lower-case words; special tokens as above."""
    words = Tokenizer(WordLevel(unk_token=SPECIAL["unk"]))
    words.normalizer = normalizers.Lowercase()
    words.pre_tokenizer = split
    options = {"special_tokens": [*SPECIAL.values()], "show_progress": False}
    words.train_from_iterator(texts, WordLevelTrainer(vocab_size=vocabulary, min_frequency=2, **options))
    return with_special_tokens(words)


def train_symbols(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of what stands between spaces: all that ``texts`` have."""
    return make_symbol_tokenizer(sorted({symbol for text in texts for symbol in text.split()}))


def make_symbol_tokenizer(symbols: Iterable[str], ends: bool = True) -> PreTrainedTokenizerFast:
    """Return a tokenizer of these symbols, in their order from 0, between spaces; special tokens come after them."""
    vocabulary = {symbol: number for number, symbol in enumerate([*symbols, *SPECIAL.values()])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=SPECIAL["unk"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return with_special_tokens(tokenizer, ends)


def with_special_tokens(tokenizer: Tokenizer, ends: bool = True) -> PreTrainedTokenizerFast:
    """Return a tokenizer as transformers takes it, each text between <s> and </s> unless without ``ends``."""
    if ends:
        outer = ((SPECIAL[name], tokenizer.token_to_id(SPECIAL[name])) for name in ("eos", "bos"))
        tokenizer.post_processor = processors.RobertaProcessing(*outer, add_prefix_space=False)
    options: dict[str, Any] = {f"{name}_token": token for name, token in SPECIAL.items()}
    options |= {"cls_token": SPECIAL["bos"], "sep_token": SPECIAL["eos"]}
    options["model_input_names"] = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def model_config(args: RecipeArguments, *, scratch: bool = False, **config: Any) -> Any:
    """Return the configuration of the model; of one from ``scratch``, with the fields that were asked for, if any."""
    requested = parse_options(args.from_scratch)
    if reserved := sorted(requested.keys() & config.keys()):
        raise GraphFilterError(f"--from_scratch: {reserved[0]} is set by the recipe, leave it out")
    if (requested or scratch) and args.model in CONFIG_MAPPING:
        with loading_errors(args.model, "made"):
            new_config = transformers.AutoConfig.for_model(args.model, **config, **requested)
        fields = CONFIG_MAPPING[args.model]().to_dict()
    else:
        with loading_errors(args.model):
            new_config = transformers.AutoConfig.from_pretrained(args.model, **config, **requested)
        new_config.update(config)  # fields too that such a config does not have
        fields = new_config.to_dict() | new_config.attribute_map
    if unknown := [name for name in requested if name not in fields]:
        hint = f"{unknown[0]!r}{nearest(unknown[0], fields)}"
        raise GraphFilterError(f"--from_scratch: a {new_config.model_type} config has no field {hint}")
    return new_config


@contextmanager
def loading_errors(source: str, verb: str = "loaded") -> Iterator[None]:
    """Turn what transformers says of a model or tokenizer that cannot be loaded or made into one line that names it."""
    try:
        yield
    except GraphFilterError:
        raise
    except (OSError, ValueError, KeyError, NotImplementedError, AssertionError, StrictDataclassError) as error:
        is_remote = verb == "loaded" and isinstance(error, OSError) and not Path(source).exists()
        hint = "; without a connection, name a folder: --model FOLDER" * is_remote
        raise GraphFilterError(f"{source} cannot be {verb}: {line(error)}{hint}") from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise GraphFilterError(
            f"{source} cannot be loaded: its weights, in the report above, have other sizes than this task and these "
            "settings ask for"
        ) from error


def build_model(
    args: RecipeArguments, training: Seq2SeqTrainingArguments, auto_class: Any, tokenizer: Any | None, **config: Any
) -> PreTrainedModel:
    """Return the model, the same for every filter with the same seed, patched with the filter.

    Without a tokenizer it is one without a vocabulary.
    """
    set_seed(training.seed)
    config["dtype"] = torch.float32  # a checkpoint stored in half precision would train in it
    if args.from_scratch:
        if tokenizer is None:
            config |= {"vocab_size": 1, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
        else:
            config |= {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
            config |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        new_config = model_config(args, **config)
        if new_config.is_encoder_decoder and getattr(new_config, "decoder_start_token_id", None) is None:
            new_config.decoder_start_token_id = tokenizer.pad_token_id
        with loading_errors(args.model, "made"):
            model = auto_class.from_config(new_config)
    else:
        with loading_errors(args.model):
            model = auto_class.from_pretrained(args.model, **config)
        if tokenizer is not None and model.config.get_text_config().pad_token_id is None:
            model.config.pad_token_id = tokenizer.pad_token_id
    patch(args, model)
    return model


def patch(args: FilterArguments, model: Any) -> None:
    """Patch the model with the filter that was asked for."""
    if args.filter != "none":
        options = parse_options(args.filter_options)
        # a filter with random weights must not change what is drawn after it, such as a head
        with mark_refusals(), torch.random.fork_rng(devices=[]):
            patch_model(model, args.filter, layers=args.layers, **options)


def load_model(folder: Path) -> Any:
    """Load a checkpoint of transformers as the class that was saved."""
    named = transformers.AutoConfig.from_pretrained(folder).architectures
    if not (named and (saved_class := model_class(named[0]))):
        raise GraphFilterError(f"{folder}: its config.json names {shown(named)}, which is no model of transformers")
    return saved_class.from_pretrained(folder)
