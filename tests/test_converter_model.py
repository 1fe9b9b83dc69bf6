"""Converter as a whole model: its layer against the formulas, padding, and what transformers expects of a model."""

import math

import pytest
import torch
from test_unitary import phi
from torch import nn
from torch.nn.functional import cross_entropy, softplus
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
    pipeline,
)
from transformers.trainer_utils import set_seed

from hf_graphfilter import (
    ConverterConfig,
    ConverterForMaskedLM,
    ConverterForSequenceClassification,
    ConverterModel,
    GraphFilterError,
    filter_status,
    patch_model,
)
from hf_graphfilter.functional import gibbs_damping, kernel_polynomial_loss
from hf_graphfilter.models.converter.layers import pooled

SIZES = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2}
DROPOUTS = [name for name in ConverterConfig().to_dict() if name.endswith("dropout")]
MODELS = {
    ConverterModel: AutoModel,
    ConverterForSequenceClassification: AutoModelForSequenceClassification,
    ConverterForMaskedLM: AutoModelForMaskedLM,
}
every_model = pytest.mark.parametrize("cls", MODELS, ids=lambda cls: cls.__name__)
TOKENS = 7


def build(cls=ConverterModel, dropout=0.0, **options):
    set_seed(0)
    model = cls(ConverterConfig(**{**SIZES, **dict.fromkeys(DROPOUTS, dropout), **options})).eval()
    with torch.no_grad():  # away from the symmetric start
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "zeta")):
                parameter.uniform_(0.2, 0.8)
    return model


def tokens(batch=3, count=TOKENS, seed=0):
    return torch.randint(20, (batch, count), generator=torch.Generator().manual_seed(seed))


def inputs(cls, batch=3):
    """With labels."""
    ids = tokens(batch)
    if cls is ConverterModel:
        return {"input_ids": ids}
    return {"input_ids": ids, "labels": ids if cls is ConverterForMaskedLM else ids[:, 0] % 2}


def result(out):
    return out.last_hidden_state if "last_hidden_state" in out else out.logits


def scale_norm(x, norm):
    return norm.weight * x / (x.abs().square().sum(-1, keepdim=True).sqrt() + norm.eps)


def layer_by_definition(layer, x, damping):
    """One sequence (tokens, features) by the formulas, with the matrix of all tokens."""
    convolution = layer.convolution

    def numbers(siren, count):
        hidden = (x @ siren[0].weight.T + siren[0].bias).sin()
        return (hidden @ siren[1].weight.T + siren[1].bias).sin().unflatten(-1, (count, -1)).mean(-1).T

    angles = 2 * math.pi * numbers(convolution.spectrum.angles, 6)
    argument = numbers(convolution.spectrum.eigenvalues, 1)[0]
    if damping is not None:
        theta = argument.arccos()
        argument = sum(
            g * w * (k * theta).cos() for k, (g, w) in enumerate(zip(damping, convolution.coefficients, strict=True))
        )
    Phi = phi(angles[:3, :-1], angles[3:, :-1], torch.zeros_like(argument))
    assert (Phi @ Phi.mH - torch.eye(len(x))).abs().max() < 1e-12
    value = torch.complex(x @ convolution.value_real.weight.T, x @ convolution.value_imag.weight.T)
    z = Phi.mH @ torch.diag(torch.exp(1j * argument)) @ Phi @ value
    z, part = scale_norm(z + x, layer.convolution_norm), layer.feed_forward
    gated = part.output(softplus(part.real(z.real)) * part.imag(z.imag).tanh())
    return scale_norm(gated + layer.zeta * z.real + (1 - layer.zeta) * z.imag, layer.feed_forward_norm)


@torch.no_grad()
@pytest.mark.parametrize("options", [{"kernel": "jackson", "K": 3}, {"convolution": "synvolution"}])
def test_layers_equal_the_formulas(options):
    model = build(**options).double()
    states = model(tokens(1), output_hidden_states=True).hidden_states
    damping = None if "convolution" in options else gibbs_damping("jackson", 3)
    for layer, before, after in zip(model.layers, states, states[1:], strict=False):
        torch.testing.assert_close(layer_by_definition(layer, before[0], damping), after[0], atol=1e-10, rtol=0)


def test_embeddings_equal_their_definition():
    for kind in ("absolute", "sinusoidal", "none", "gru"):
        part = build(position_embedding=kind, embedding_size=6).embeddings
        words = part.word_embeddings(tokens())
        place = torch.arange(TOKENS, dtype=torch.float)[:, None] / 10000 ** (torch.arange(3) / 3)
        position = {
            "absolute": lambda part=part: part.position.weight[:TOKENS],
            "sinusoidal": lambda place=place: torch.stack([place.sin(), place.cos()], -1).flatten(1),
            "none": lambda: 0,
            "gru": lambda part=part, words=words: part.position(words)[0],
        }[kind]()
        expected = scale_norm(part.projection(words + position), part.norm)
        torch.testing.assert_close(part(words, None), expected)


def adapted(model):
    peft = pytest.importorskip("peft")
    return peft.inject_adapter_in_model(
        peft.LoraConfig(target_modules=["value_real"], modules_to_save=["position"]), model
    )


def with_lora_on_positions(model):
    peft = pytest.importorskip("peft")
    return peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["position"]), model)


def compiled(model):
    model.embeddings.position = torch.compile(model.embeddings.position, backend="eager")
    return model


def quantized(model):
    return torch.ao.quantization.quantize_dynamic(model, {nn.GRU})


@pytest.mark.filterwarnings("ignore:.*quantiz:DeprecationWarning", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("position", "change", "tolerance"),
    [
        ("gru", adapted, 0),
        ("gru", compiled, 1e-6),
        ("gru", quantized, 2e-2),
        ("absolute", adapted, 0),
        ("absolute", with_lora_on_positions, 0),
    ],
)
def test_positions_by_a_module_put_in_the_place_of_theirs(position, change, tolerance):
    """By the embeddings, whose norm would hide what the positions are."""
    model = build(position_embedding=position)
    embeds = torch.randn(3, TOKENS, 16)
    expected = model.embeddings._positions(embeds, None)
    found = change(model).eval().embeddings._positions(embeds, None)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gru_whose_weights_are_offloaded(dtype):
    cpu_offload = pytest.importorskip("accelerate").cpu_offload
    model = build().to(dtype)
    expected = model(tokens()).last_hidden_state
    torch.testing.assert_close(cpu_offload(model)(tokens()).last_hidden_state, expected, atol=0.02, rtol=0)


PADDED = {"right": [1, 1, 1, 1, 0, 0, 0], "left": [0, 0, 0, 1, 1, 1, 1], "holes": [0, 1, 1, 0, 1, 0, 1]}


@pytest.mark.parametrize("side", PADDED)
@pytest.mark.parametrize("position", ["gru", "absolute", "sinusoidal", "none"])
def test_padding_changes_no_other_token(position, side):
    model, ids = build(position_embedding=position), tokens(1)
    mask = torch.tensor([PADDED[side], [1] * TOKENS])
    padded = model(torch.cat([ids, ids]), attention_mask=mask).last_hidden_state
    alone = model(ids[:, mask[0].bool()]).last_hidden_state
    torch.testing.assert_close(padded[0, mask[0].bool()], alone[0])
    torch.testing.assert_close(padded[1], model(ids).last_hidden_state[0])


@pytest.mark.parametrize("side", PADDED)
@pytest.mark.parametrize("pooling", ["mean", "max", "mean_max", "cls"])
def test_pooling_knows_padding(pooling, side):
    model, ids = build(ConverterForSequenceClassification, pooling=pooling), tokens(1)
    for mask in (torch.tensor([PADDED[side]]), torch.tensor([PADDED[side]], dtype=torch.bool)):
        alone = model(ids[:, mask[0].bool()]).logits
        torch.testing.assert_close(model(ids, attention_mask=mask).logits, alone)


@every_model
def test_saving_and_loading_by_the_auto_classes(cls, tmp_path, transformers_warnings):
    model = build(cls, kernel="lorentz", embedding_size=6)
    model.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).xi == 4.0
    again, info = MODELS[cls].from_pretrained(tmp_path, output_loading_info=True)
    assert type(again) is cls
    assert not any(info.values())
    assert torch.equal(result(again(tokens())), result(model(tokens())))
    whole = AutoModel.from_pretrained(tmp_path)  # without the head
    assert cls is ConverterModel or "UNEXPECTED" in transformers_warnings.pop()
    assert torch.equal(whole(tokens()).last_hidden_state, model.base_model(tokens()).last_hidden_state)


def test_what_a_checkpoint_lacks_gets_its_start_values(tmp_path, transformers_warnings):
    model = build()
    state = {
        name: tensor for name, tensor in model.state_dict().items() if "layers.1" not in name and "_l1" not in name
    }
    model.save_pretrained(tmp_path, state_dict=state)
    again = ConverterModel.from_pretrained(tmp_path)
    assert "MISSING" in transformers_warnings.pop()
    layer, old = again.layers[1].convolution, again.layers[0].convolution
    assert layer.coefficients.detach().tolist() == pytest.approx([1 / 3, 2 / 3, 2 / 3])
    weight = layer.spectrum.angles[0].weight
    assert 0.5 < weight.abs().max() <= math.sqrt(6 / 16), "SIREN's own start, not a Linear's"
    assert torch.equal(old.spectrum.angles[0].weight, model.layers[0].convolution.spectrum.angles[0].weight)
    assert 0 < again.embeddings.position.weight_hh_l1.abs().max() <= 0.25
    assert layer.value_real.weight.std().item() == pytest.approx(math.sqrt(0.5), rel=0.2)


def test_new_models_start_as_told():
    set_seed(0)
    layer = ConverterModel(ConverterConfig(**SIZES)).layers[0]
    assert layer.zeta.item() == 1
    assert layer.convolution_norm.weight.unique().tolist() == [1]
    assert not layer.feed_forward.real.bias.any()
    assert layer.feed_forward.real.weight.abs().max() > 0.3, "Xavier's"


@every_model
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(cls, reentrant):
    model, gradients = build(cls).train(), []
    for checkpointing in (False, True):
        if checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable({"use_reentrant": reentrant})
        model.zero_grad()
        out = model(**inputs(cls))
        (out["loss"] if "loss" in out else result(out).square().sum() + out.kernel_polynomial_loss).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])  # all have one
    torch.testing.assert_close(*gradients)


def test_zeta_learns_from_its_bound():
    model = ConverterModel(ConverterConfig(**SIZES))
    model(tokens()).last_hidden_state[..., 0].sum().backward()
    assert model.layers[0].zeta.grad != 0


@every_model
def test_resizing_the_embeddings(cls):
    model = build(cls)
    model.resize_token_embeddings(25, mean_resizing=False)
    assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == 25
    assert model(torch.full((1, 3), 24))
    if cls is ConverterForMaskedLM:
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert model(tokens()).logits.shape[-1] == len(model.head.decoder.bias) == 25


@every_model
def test_outputs(cls):
    model, ids = build(cls), tokens()
    out = model(ids, output_hidden_states=True)
    assert [state.shape for state in out.hidden_states] == [(3, TOKENS, 16)] * 3
    assert torch.equal(model(ids, return_dict=False)[0], result(out))
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(result(model(inputs_embeds=embeds)), result(out))
    assert "kernel_polynomial_loss" not in out
    assert model(ids[:, :1]) is not None, "one token"


@pytest.mark.parametrize("interaction", ["nli", "concat"])
def test_two_sequences(interaction):
    model = build(ConverterForSequenceClassification, num_sequences=2, interaction=interaction, num_labels=3)
    first, second, mask = tokens(), tokens(count=5, seed=1), torch.tensor([[0, 1, 1, 1, 1]] * 3)
    options = {"input_ids_2": second, "attention_mask_2": mask, "output_hidden_states": True}
    out = model(first, labels=torch.tensor([0, 1, 2]), **options)
    u, v = model.converter(first).last_hidden_state.mean(1), model.converter(second[:, 1:]).last_hidden_state.mean(1)
    parts = [u, v, u * v, u - v] if interaction == "nli" else [u, v]
    hidden = nn.functional.leaky_relu(model.classifier.dense(torch.cat(parts, -1)))
    torch.testing.assert_close(out.logits, model.classifier.output(hidden))
    assert out.hidden_states[0].shape[1] == TOKENS
    assert out.hidden_states_2[0].shape[1] == 5
    embeds = model.get_input_embeddings()(second)
    options = {"inputs_embeds_2": embeds, "attention_mask_2": mask}
    torch.testing.assert_close(model(first, **options).logits, out.logits)
    with pytest.raises(GraphFilterError, match=r"classifies pairs .* input_ids_2 or inputs_embeds_2 is missing"):
        model(first)
    with pytest.raises(GraphFilterError, match=r"single sequences .* is not expected"):
        build(ConverterForSequenceClassification)(first, input_ids_2=second)


LABELS = {
    "single_label_classification": (torch.tensor([0, 2, 1]), cross_entropy),
    "multi_label_classification": (torch.eye(3), nn.functional.binary_cross_entropy_with_logits),
    "regression": (torch.ones(3, 3), nn.functional.mse_loss),
}


@pytest.mark.parametrize("problem", LABELS)
def test_the_loss_is_that_of_equation_14(problem):
    labels, task = LABELS[problem]
    model = build(ConverterForSequenceClassification, num_labels=3, eta=0.1, problem_type=problem)
    out = model(tokens(), labels=labels)
    torch.testing.assert_close(out.loss, task(out.logits, labels), msg="evaluation: that of the task")
    with torch.no_grad():
        model.converter.layers[0].convolution.coefficients.add_(1)
    out = model.train()(tokens(), labels=labels)
    expected = [kernel_polynomial_loss(layer.convolution.coefficients) for layer in model.converter.layers]
    torch.testing.assert_close(out.kernel_polynomial_loss, sum(expected) / 2)
    torch.testing.assert_close(out.loss, 0.9 * task(out.logits, labels) + 0.1 * sum(expected) / 2)


NO_PENALTY = [{"eta": 0.0}, {"eta": 0.5, "convolution": "synvolution"}]


@pytest.mark.parametrize("options", NO_PENALTY)
def test_no_kernel_polynomial_loss(options):
    model = build(ConverterForMaskedLM, **options).train()
    out = model(tokens(), labels=tokens())
    assert out.kernel_polynomial_loss is None
    torch.testing.assert_close(out.loss, cross_entropy(out.logits.flatten(0, 1), tokens().flatten()))


def test_losses_of_parts_of_a_batch_sum_to_that_of_the_batch():
    """As the Trainer accumulates them, with labels unequally many."""
    model, ids = build(ConverterForMaskedLM, eta=0.3).train(), tokens()
    labels = ids.where(torch.arange(TOKENS) < torch.tensor([[1], [4], [7]]), -100)
    whole = model(ids, labels=labels).loss
    parts = [
        model(ids[i : i + 1], labels=labels[i : i + 1], num_items_in_batch=torch.tensor(12)).loss for i in range(3)
    ]
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize("options", [{"eta": 0.3}, *NO_PENALTY])
@pytest.mark.parametrize(("classes", "labels"), [(1, torch.randn(3)), (2, torch.tensor([[0.0, 1], [1, 1], [0, 0]]))])
def test_losses_of_parts_that_are_means_of_their_own(classes, labels, options):
    """Of numbers and of several labels at once: transformers divides these by what it is given."""
    model, ids = build(ConverterForSequenceClassification, num_labels=classes, **options).train(), tokens()
    whole, count = model(ids, labels=labels).loss, torch.tensor(labels.numel())
    parts = [model(ids[i : i + 1], labels=labels[i : i + 1], num_items_in_batch=count).loss for i in range(3)]
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize("cls", [ConverterForSequenceClassification, ConverterForMaskedLM])
def test_a_loss_that_others_compute_is_told_of_the_other(cls, tmp_path):
    model, given = build(cls, eta=0.1).train(), inputs(cls)
    arguments = TrainingArguments(tmp_path, label_smoothing_factor=0.1, report_to=[], use_cpu=True)
    model(given["input_ids"])  # nothing is minimised
    loss = Trainer(model, arguments).compute_loss(model, given)
    with pytest.warns(UserWarning, match=r"^eta=0.1 asks .* add eta \* outputs.kernel_polynomial_loss"):
        loss.backward()
    model.eval()(given["input_ids"]).logits.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("position", ["gru", "absolute", "sinusoidal"])
def test_half_precision(dtype, position):
    exact = build(ConverterForMaskedLM, position_embedding=position)
    model = build(ConverterForMaskedLM, position_embedding=position).to(dtype).train()
    seen = []
    model.converter.layers[0].convolution.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    out = model(**inputs(ConverterForMaskedLM), attention_mask=torch.ones(3, TOKENS), output_hidden_states=True)
    assert seen == [torch.complex64]
    assert {state.dtype for state in out.hidden_states} == {out.logits.dtype} == {dtype}
    assert (out.hidden_states[-1] - exact(tokens(), output_hidden_states=True).hidden_states[-1]).abs().max() < 0.05
    out.loss.backward()
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in model.parameters())


def test_autocast():
    model = build()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(tokens(), attention_mask=torch.ones(3, TOKENS)).last_hidden_state
    assert (out - model(tokens()).last_hidden_state).abs().max() < 0.05


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo's own, where a graph breaks, as at a GRU
@pytest.mark.parametrize(
    ("backend", "position"), [pytest.param("eager", "gru", marks=pytest.mark.slow), ("aot_eager", "sinusoidal")]
)
def test_compile(backend, position):
    model = build(ConverterForSequenceClassification, position_embedding=position, num_hidden_layers=1)
    mask = torch.tensor([PADDED["left"]] * 3)
    build(position_embedding="gru")  # a class that had a module there has been seen
    torch.compiler.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=position != "gru")
    torch.testing.assert_close(compiled(tokens(), attention_mask=mask).logits, model(tokens(), mask).logits)


def test_exported_for_any_batch():
    model = build(ConverterForSequenceClassification, position_embedding="none", num_hidden_layers=1, pooling="cls")
    mask = torch.tensor([PADDED["left"]])
    given = {"input_ids": tokens(), "attention_mask": mask.expand(3, -1)}
    sizes = {key: {0: torch.export.Dim.DYNAMIC} for key in given}
    with torch.no_grad():
        program = torch.export.export(model, (), given, dynamic_shapes=sizes).module()
        other = {"input_ids": tokens(5), "attention_mask": mask.expand(5, -1)}
        torch.testing.assert_close(program(**other).logits, model(**other).logits)


def test_the_plain_trainer_trains_it(tmp_path):
    labels = torch.arange(64) % 2
    data = [
        {"input_ids": ids, "labels": label}
        for ids, label in zip(tokens(64) // 2 + 10 * labels[:, None], labels, strict=True)
    ]
    model = build(ConverterForSequenceClassification, num_hidden_layers=1, dropout=0.1, eta=0.01)
    arguments = TrainingArguments(
        tmp_path,
        max_steps=30,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        learning_rate=2e-2,
        logging_steps=10,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        max_grad_norm=1.0,
    )
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]
    predicted = trainer.predict(data[:4])
    assert predicted.predictions.shape == (4, 2), "logits alone"


def test_a_pipeline_takes_it():
    transformers = pytest.importorskip("transformers")
    classify = pipeline(
        "text-classification",
        model=build(ConverterForSequenceClassification, vocab_size=384),
        tokenizer=transformers.ByT5Tokenizer(),
        device="cpu",
    )
    assert len(classify(["short", "somewhat longer"], batch_size=2)) == 2


def test_there_is_no_attention_to_patch_or_to_give():
    model = build()
    before = model(tokens()).last_hidden_state
    with pytest.raises(GraphFilterError, match="ConverterModel has no self-attention to patch"):
        patch_model(model, "gfsa")
    assert not filter_status(model)
    with pytest.raises(GraphFilterError, match="no attention matrices to give"):
        model(tokens(), output_attentions=True)
    assert torch.equal(model(tokens()).last_hidden_state, before)


BAD_CONFIGS = {
    "kernel='gauss': use one of 'dirichlet'": {"kernel": "gauss"},
    "position_embedding='rope': use one of 'gru'": {"position_embedding": "rope"},
    "pooling='sum': use one of": {"pooling": "sum"},
    "interaction='dot': use one of": {"interaction": "dot"},
    "convolution='fft': use one of": {"convolution": "fft"},
    "K must be an integer >= 0": {"K": -1},
    "xi must be a finite number": {"kernel": "lorentz", "xi": 0},
    r"eta must be in \[0, 1\), got 1": {"eta": 1},
    r"eta must be in \[0, 1\), got -0.1": {"eta": -0.1},
    r"value_dropout must be in \[0, 1\)": {"value_dropout": 1.5},
    "hidden_size must be an integer >= 1": {"hidden_size": 0},
    "embedding_size must be an integer >= 1": {"embedding_size": -4},
    "num_sequences must be 1 or 2": {"num_sequences": 3},
    "num_sequences must be 1 or 2, got 1.0": {"num_sequences": 1.0},
    "intermediate_size must be an integer >= 1, got True": {"intermediate_size": True},
    "norm_eps must be a number >= 0, got -1": {"norm_eps": -1.0},
    "initializer_range must be a number >= 0, got nan": {"initializer_range": math.nan},
    "is_decoder: Converter is an encoder": {"is_decoder": True},
}


@pytest.mark.parametrize("message", BAD_CONFIGS)
def test_configs_that_cannot_be(message):
    with pytest.raises(GraphFilterError, match=message):
        ConverterConfig(**BAD_CONFIGS[message])


def test_overrides_of_a_checkpoint_are_checked(tmp_path):
    ConverterConfig(kernel="jackson").save_pretrained(tmp_path)
    with pytest.raises(GraphFilterError, match="pooling='sum': use one of"):
        ConverterConfig.from_pretrained(tmp_path, pooling="sum")
    assert ConverterConfig.from_pretrained(tmp_path, pooling="max").pooling == "max"


def test_inputs_that_cannot_be():
    model, ids = build(position_embedding="absolute", max_position_embeddings=5), tokens()
    with pytest.raises(GraphFilterError, match="7 tokens, and max_position_embeddings is 5"):
        model(ids)
    with pytest.raises(
        GraphFilterError, match=r"attention_mask must be \(batch, tokens\), here \(3, 4\), got \(3, 7\)"
    ):
        model(ids[:, :4], attention_mask=torch.ones(3, 7))
    with pytest.raises(GraphFilterError, match="either input_ids or inputs_embeds"):
        model()
    for name in ("encoder_hidden_states", "cache", "past_key_values", "position_ids"):
        with pytest.raises(GraphFilterError, match=f"leave out {name}"):
            model(ids[:, :4], **{name: ids})
    for bad in ({"input_ids": ids[0]}, {"input_ids": ids[:, :0]}, {"inputs_embeds": torch.zeros(3, 4, 16) + 0j}):
        with pytest.raises(GraphFilterError, match=r"takes input_ids \(batch, tokens\), of a token at least"):
            model(**bad)


def test_pairs_that_cannot_be():
    model, ids = build(ConverterForSequenceClassification, num_sequences=2), tokens()
    with pytest.raises(GraphFilterError, match="input_ids_2 or inputs_embeds_2 is missing"):
        model(ids, attention_mask_2=torch.ones(3, 7))
    with pytest.raises(GraphFilterError, match="a pair: 3 first ones, 2 second"):
        model(ids, input_ids_2=ids[:2])


@pytest.mark.parametrize("pooling", ["mean", "max", "mean_max", "cls"])
def test_a_sequence_without_visible_tokens_is_nothing(pooling):
    mask = torch.ones(3, TOKENS)
    mask[1] = 0
    out = pooled(torch.randn(3, TOKENS, 4), mask.bool(), pooling)
    assert out[1].abs().max() == 0
    assert out[2].abs().min() > 0
