"""Train or fine-tune a causal language model on text, with a graph filter in its attention.

    python recipes/language_modeling.py --config language_modeling/gpt2.yaml --task wikitext-2
    python recipes/language_modeling.py --model gpt2 --task text --data my/folder --max_length 512

Tasks: wikitext-2, wikitext-103, ptb; text, with --data a folder of train, valid and test files (.txt, or .jsonl with a
field text); or any data set of the Hub with a column text, as OWNER/NAME or OWNER/NAME:CONFIG.

The score is the perplexity per token, measured by a sliding window. Each window of --max_length tokens scores its last
--stride tokens (the first window scores all its tokens). So every token counts once, with at least max_length - stride
tokens before it. If the two flags are equal, the first token of each window has no score.
"""

if __name__ == "__main__":
    from recipes import check_extras

    check_extras("recipes")

from functools import lru_cache
from pathlib import Path

import torch
from datasets import Dataset, DatasetDict
from transformers import AutoModelForCausalLM, default_data_collator

from hf_graphfilter import GraphFilterError
from hf_graphfilter.filters.core.attached import is_sharded
from recipes import metrics, runs
from recipes.arguments import RecipeArguments
from recipes.data import cut, load_from_hub, make_table
from recipes.errors import note
from recipes.files import FILES, first_file, read_rows
from recipes.models import build_model, load_tokenizer
from recipes.settings import Recipe
from recipes.training import fit

HUB = {
    "wikitext-2": ("Salesforce/wikitext", "wikitext-2-raw-v1", {}),
    "wikitext-103": ("Salesforce/wikitext", "wikitext-103-raw-v1", {}),
    "ptb": ("ptb-text-only/ptb_text_only", None, {"revision": "refs/convert/parquet"}),
}


@lru_cache(maxsize=1)
def load(task: str, folder: str | None) -> DatasetDict:
    """Return lines of text by part; without a validation part, the last 5 % of the training lines are one."""
    if folder is None:
        if task == "text":
            raise GraphFilterError("--task text needs --data, a folder with train, valid and test files")
        name, _, config = task.partition(":")
        name, config, options = HUB.get(task, (name, config or None, {}))
        data = load_from_hub(name, {"text": ("text", "sentence")}, config, **options)
        if "train" not in data:
            raise GraphFilterError(f"{name} has no part 'train'; it has {', '.join(data)}")
        parts = {k: data[k] for k in FILES if k in data}
    else:
        root, parts = Path(folder), {}
        for part, stem in FILES.items():
            names = [f"{stem}.txt", f"ptb.{stem}.txt", f"wiki.{stem}.tokens", f"wiki.{stem}.raw", f"{stem}.jsonl"]
            if part == "train" or any((root / name).is_file() for name in names):
                file = first_file(root, names)
                parts[part] = make_table(read_rows(file), {"text": ("text",)}, file)
    if "validation" not in parts:
        train_size = len(parts["train"]) - max(1, len(parts["train"]) // 20)
        if train_size < 1:
            raise GraphFilterError(
                f"{len(parts['train'])} lines leave nothing to validate on: give a validation part too"
            )
        parts["validation"] = parts["train"].select(range(train_size, len(parts["train"])))
        parts["train"] = parts["train"].select(range(train_size))
    return DatasetDict(parts)


@lru_cache(maxsize=1)
def tokens(task: str, folder: str | None, model: str, tokenizer: str | None, train_tokenizer: int | None) -> tuple:
    """Return (tokenizer, one tensor of token ids for each part)."""
    data = load(task, folder)
    args = RecipeArguments(model, task, tokenizer=tokenizer, train_tokenizer=train_tokenizer)
    loaded = load_tokenizer(args, lambda: iter(data["train"]["text"]))
    ids = {}
    for part, lines in data.items():
        lines = [line if line.endswith("\n") else line + "\n" for line in lines["text"]]
        encoded = loaded(lines, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        ids[part] = torch.tensor([i for line in encoded for i in line])
    return loaded, ids


def blocks(ids: torch.Tensor, length: int) -> Dataset:
    """Return training rows: the text in pieces of ``length`` tokens, the rest left out."""
    rows = ids[: len(ids) // length * length].view(-1, length).tolist()
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def windows(ids: torch.Tensor, length: int, stride: int, pad: int) -> Dataset:
    """Return evaluation rows: windows that overlap, with the labels of the tokens not yet counted."""
    rows, labels, counted = [], [], 0
    for begin in range(0, max(1, len(ids) - 1), stride):
        end = min(begin + length, len(ids))
        room = begin + length - end
        rows.append([*ids[begin:end].tolist(), *[pad] * room])
        labels.append([*[-100] * (counted - begin), *ids[counted:end].tolist(), *[-100] * room])
        counted = end
        if end == len(ids):
            break
    return Dataset.from_dict({"input_ids": rows, "labels": labels})


def sums(logits, labels):
    """Return (rows, 2): negative log-likelihood and number of tokens, so that no logits are kept."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    following = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)  # so that no logits are copied
    nll = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), following.flatten(), ignore_index=-100, reduction="none"
    )
    counted = following != -100
    return torch.stack([nll.view_as(counted).sum(-1), counted.sum(-1).to(nll)], -1)


def compute(prediction):
    nll, counts = prediction.predictions.T
    return metrics.load("perplexity").compute(nll=nll, tokens=counts)


@torch.no_grad()
def check_causal(model, tolerance=None):
    """Raise an error if the model's prediction of a token depends on later tokens, since perplexity is then void.

    ``tolerance``: the change of a logit that is put down to rounding, as a part of the largest logit.
    """
    if any(map(is_sharded, model.parameters())):
        note("the weights are spread over processes: it is not checked whether the model reads later tokens")
        return
    ids = torch.arange(8)[None] % model.config.get_text_config().vocab_size
    changed_ids = ids.clone()
    changed_ids[0, -1] = 0
    model.eval()
    logits, changed_logits = (model(input_ids=x.to(model.device)).logits[0, :-1].float() for x in (ids, changed_ids))
    tolerance = tolerance or 32 * torch.finfo(model.dtype).eps
    if (logits - changed_logits).abs().max() > tolerance * logits.abs().max():
        raise GraphFilterError(
            f"{type(model).__name__} reads the tokens that it is to predict: name a causal --model and --filter, or "
            "for one from scratch of a type like bert add --from_scratch is_decoder=true"
        )


def run(args, training):
    """Do one training run."""
    stride = args.max_length // 2 if args.stride is None else args.stride
    if not 1 <= stride <= args.max_length:
        raise GraphFilterError(f"--stride {stride}: a number from 1 to --max_length {args.max_length}")
    tokenizer, ids = tokens(args.task, args.data, args.model, args.tokenizer, args.train_tokenizer)
    if args.task in HUB and "test" not in ids and not args.held_out:
        raise GraphFilterError(f"{args.task} is compared by its test part, which --data {args.data} lacks")
    model = build_model(args, training, AutoModelForCausalLM, tokenizer)
    check_causal(model)
    longest = getattr(model.config, "max_position_embeddings", args.max_length)
    if args.max_length > longest:
        raise GraphFilterError(f"--max_length {args.max_length}: {type(model).__name__} takes {longest} tokens at most")
    rows = {"train": blocks(ids["train"], args.max_length)}
    for part in [name for name in ids if name != "train"]:
        rows[part] = windows(ids[part], args.max_length, stride, tokenizer.pad_token_id)
    if not len(rows["train"]):
        raise GraphFilterError(
            f"the training text has {len(ids['train'])} tokens, less than --max_length {args.max_length}"
        )
    options = {"data_collator": default_data_collator, "preprocess_logits_for_metrics": sums}
    outcome = fit(args, training, model, tokenizer, cut(DatasetDict(rows), args), compute_metrics=compute, **options)
    check_causal(model, tolerance=0.01)  # a filter may have started at 0; trained weights can amplify rounding errors
    return outcome


RECIPE = Recipe(
    name="language_modeling",
    metrics=dict.fromkeys(HUB, "test/perplexity") | dict.fromkeys(("text", "*"), "validation/perplexity"),
    run=run,
    defaults={
        "num_train_epochs": 3,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 5e-5,
        "max_length": 1024,
    },
    description=__doc__,
    known=lambda task: "/" in task,
)

if __name__ == "__main__":
    runs.main(RECIPE)
