"""Pipelines of transformers and sentence-transformers: a patched checkpoint in the place of a plain one."""

import pytest
import torch
from filters import filters
from models import FAMILIES, turn_on
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import (
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    ViTForImageClassification,
    ViTImageProcessorPil,
    pipeline,
)

from hf_graphfilter import (
    GraphFilterError,
    create_model_card,
    filter_status,
    linearize,
    load_filter,
    patch_model,
    save_filter,
    transfer_attention,
    unpatch_model,
)
from hf_graphfilter.cli.checkpoints import save

SENTENCE = "graph filter attention smooth token high low frequency layer paper learn model text word deep is a"
WORDS = SENTENCE.split()
TEXTS = ["attention is a low frequency filter", "deep layer smooth token"]
GENERATE = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
CASES = {
    "text-classification": ("bert", BertForSequenceClassification, TEXTS, {"batch_size": 2}),
    "token-classification": ("bert", BertForTokenClassification, TEXTS, {}),
    "fill-mask": ("bert", BertForMaskedLM, "graph [MASK] attention is a low text", {}),
    "feature-extraction": ("bert", BertModel, TEXTS, {}),
    "text-generation": ("llama", LlamaForCausalLM, TEXTS, GENERATE),
    "text-generation, in batches": ("gpt2", GPT2LMHeadModel, TEXTS, {**GENERATE, "batch_size": 2}),
    "image-classification": ("vit", ViTForImageClassification, None, {}),
}


def tokenizer(padding_side="right"):
    special = ["[PAD]", "[UNK]", "[MASK]", "[CLS]", "[SEP]"]
    model = Tokenizer(WordLevel({w: i for i, w in enumerate([*special, *WORDS])}, unk_token="[UNK]"))
    model.pre_tokenizer = Whitespace()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]", "cls_token": "[CLS]"}
    made = PreTrainedTokenizerFast(tokenizer_object=model, sep_token="[SEP]", **names)
    made.padding_side = padding_side
    return made


@filters()
@pytest.mark.parametrize(
    ("task", "family"),
    [pytest.param(t, c[0], marks=pytest.mark.feature(f"Pipelines: {t}")) for t, c in CASES.items()],
)
def test_pipeline(task, family, entry, tmp_path, transformers_warnings):
    _, model_class, inputs, options = CASES[task]
    if entry.encoders_only and task.startswith("text-generation"):
        pytest.skip("a filter without a causal form")
    task = task.partition(",")[0]
    config = FAMILIES[family].config
    if task != "image-classification":
        config = type(config)(**{**config.to_dict(), "vocab_size": 5 + len(WORDS)})
    model = model_class(config).eval()
    with torch.no_grad():
        for module in model.base_model.modules():  # attention counts for more than the token itself
            if not isinstance(module, nn.Embedding) and getattr(module, "weight", None) is not None:
                module.weight.mul_(4)
    if task == "image-classification":
        image = pytest.importorskip("PIL.Image")
        processing = {"image_processor": ViTImageProcessorPil(size={"height": 16, "width": 16})}
        pixels = torch.randint(0, 255, (20, 24, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        inputs = image.fromarray(pixels.numpy())
    else:
        processing = {"tokenizer": tokenizer("left" if task == "text-generation" else "right")}

    def run(model):
        found = pipeline(task, model=model, device="cpu", **processing)(inputs, **options)
        transformers_warnings.clear()
        return found

    expected = run(model)
    patch_model(model, entry.config)
    assert run(model) == expected or not entry.config.starts_as_original
    turn_on(model, scale=3.0)  # so far that the greedy text of a random model is another
    found = run(model)
    assert found != expected
    model.save_pretrained(tmp_path)
    assert run(str(tmp_path)) == found


@pytest.mark.feature("Pipelines: sentence-transformers, also trained", family="bert")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@filters()
def test_sentence_transformers(entry, tmp_path, transformers_warnings):
    SentenceTransformer = pytest.importorskip("sentence_transformers").SentenceTransformer
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    model = turn_on(patch_model(FAMILIES["bert"].build(), entry.config))
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    encoder = SentenceTransformer(str(tmp_path / "model"), device="cpu")  # with mean pooling
    assert len(filter_status(encoder[0].auto_model)) == 3
    batch = tokenizer()(TEXTS, padding=True, return_tensors="pt")
    mask = batch["attention_mask"][..., None]
    with torch.no_grad():
        mean = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
    torch.testing.assert_close(encoder.encode(TEXTS, convert_to_tensor=True), mean, atol=1e-5, rtol=1e-5)

    features = [tokenizer()([text], return_tensors="pt") for text in TEXTS]
    losses.CosineSimilarityLoss(encoder)(features, torch.tensor([0.5])).backward()
    assert all(p.grad is not None for n, p in encoder.named_parameters() if "graph_filter" in n)
    encoder.save(str(tmp_path / "encoder"))
    again = SentenceTransformer(str(tmp_path / "encoder"), device="cpu")
    torch.testing.assert_close(again.encode(TEXTS), encoder.encode(TEXTS))
    transformers_warnings.clear()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_the_command_line_keeps_the_modules_of_sentence_transformers(tmp_path, transformers_warnings):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    FAMILIES["bert"].build().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    encoder = sentence_transformers.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    first = modules.Pooling(encoder[0].get_embedding_dimension(), pooling_mode="cls")
    encoder = sentence_transformers.SentenceTransformer(modules=[encoder[0], first, modules.Normalize()], device="cpu")
    encoder.max_seq_length = 7
    encoder.save(str(tmp_path / "encoder"))
    model = patch_model(BertModel.from_pretrained(tmp_path / "encoder"))
    save(model, str(tmp_path / "encoder"), tmp_path / "patched")
    again = sentence_transformers.SentenceTransformer(str(tmp_path / "patched"), device="cpu")
    assert len(filter_status(again[0].auto_model)) == 3
    assert again.max_seq_length == 7
    data = [dict(tokenizer()(TEXTS, padding=True, return_tensors="pt"))] * 2
    with pytest.raises(GraphFilterError, match="nothing to fit"):  # by its encoder, as ``linearize`` takes it
        transfer_attention(again, data, holdout=1)
    torch.testing.assert_close(again.encode(TEXTS), encoder.encode(TEXTS))
    transformers_warnings.clear()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_the_card_of_an_encoder_is_none_of_a_sentence_transformer(tmp_path, transformers_warnings):
    SentenceTransformer = pytest.importorskip("sentence_transformers").SentenceTransformer
    patch_model(FAMILIES["bert"].build()).save_pretrained(tmp_path / "encoder")
    tokenizer().save_pretrained(tmp_path / "encoder")
    SentenceTransformer(str(tmp_path / "encoder"), device="cpu").save(str(tmp_path / "saved"))
    text = (tmp_path / "saved" / "README.md").read_text()
    assert "import hf_graphfilter  # pip install hf-graphfilter\nfrom sentence_transformers import Sen" in text
    assert "AutoModel" not in text
    transformers_warnings.clear()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_sentence_transformer_is_patched_as_it_is(tmp_path, transformers_warnings):
    SentenceTransformer = pytest.importorskip("sentence_transformers").SentenceTransformer
    FAMILIES["bert"].build().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")

    def encoder():
        return SentenceTransformer(str(tmp_path / "model"), device="cpu")

    model = encoder()
    before = model.encode(TEXTS)
    assert patch_model(model, "gfsa", layers="even") is model
    assert (model.encode(TEXTS) == before).all()
    assert [row.module for row in filter_status(model)] == [f"encoder.layer.{i}.attention.self" for i in (0, 2)]
    turned = turn_on(model).encode(TEXTS)
    assert abs(turned - before).max() > 1e-3
    batches = [dict(tokenizer()(TEXTS, padding=True, return_tensors="pt"))] * 3
    converted = encoder()
    report = linearize(converted, batches, budget=20, holdout=1, window=2, progress=False)
    assert "cosine" in str(report)
    report.time(converted, lengths=[8], rounds=1)
    assert [row.tokens for row in report.speed] == [8]
    assert len(filter_status(converted)) == 3
    save_filter(model, tmp_path / "filter")
    assert (load_filter(encoder(), tmp_path / "filter").encode(TEXTS) == turned).all()
    card = create_model_card(model, repo_id="me/encoder")
    assert (card.data.library_name, card.data.pipeline_tag) == ("sentence-transformers", "sentence-similarity")
    assert 'SentenceTransformer("me/encoder")' in card.text
    model.save(str(tmp_path / "saved"))
    text = (tmp_path / "saved" / "README.md").read_text()
    assert text.count("import hf_graphfilter  # pip install hf-graphfilter\nfrom sentence_transformers import Sen") == 1
    with pytest.raises(GraphFilterError, match="not written by hf_graphfilter"):
        card.save(tmp_path / "saved" / "README.md")
    assert (tmp_path / "saved" / "README.md").read_text() == text
    assert (unpatch_model(model).encode(TEXTS) == before).all()
    transformers_warnings.clear()
