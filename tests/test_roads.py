"""Every road of an adapter into a model: right, or refused. ``python tests/test_roads.py`` writes docs/peft.md."""

import copy
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from models import FAMILIES, TRANSFORMERS_5_17
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from hf_graphfilter import GFSAConfig, GraphFilterError, patch_model
from hf_graphfilter.tables import markdown_table

peft = pytest.importorskip("peft")
from peft.utils.hotswap import hotswap_adapter  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # asked for by peft
    pytest.mark.filterwarnings("ignore:modules_to_save names graph_filter:UserWarning"),  # a base without a filter
]
PAGE = Path(__file__).parents[1] / "docs" / "peft.md"
MARKS = "<!-- roads -->", "<!-- /roads -->"
IDS = FAMILIES["llama"].inputs()["input_ids"]
BASES = {
    "no filter": lambda base: base,
    "the filter at its start values": lambda base: patch_model(base, GFSAConfig(K=3)),
    "the filter as trained": lambda base: learned(patch_model(base, GFSAConfig(K=3))),
    "the filter with another K": lambda base: learned(patch_model(base, GFSAConfig(K=7))),
}


def config(held):
    kept = ["graph_filter"] if held else None
    options = {"target_modules": ["q_proj"], "init_lora_weights": False, "modules_to_save": kept}
    return peft.LoraConfig(task_type="CAUSAL_LM", **options)


def learned(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "graph_filter" in name:
                parameter.fill_(0.3)
    return model


def without_prefix(folder):
    state = load_file(folder / "adapter_model.safetensors")
    return {key.removeprefix("base_model.model."): tensor for key, tensor in state.items()}


def set_state(model, state):
    peft.set_peft_model_state_dict(model, state)
    return model


def forgetful(save):
    """``PeftModel.from_pretrained`` once its configuration was written in another way."""

    def load(model, folder, held):
        save(folder, held)
        return peft.PeftModel.from_pretrained(model, folder)

    return load


def through_transformers(model, folder, held, **options):
    model.load_adapter(folder, **options)
    return model


def as_second(model, folder, held):
    model = peft.get_peft_model(model, config(held))
    model.load_adapter(folder, "second")
    model.set_adapter("second")
    return model


def swapped(model, folder, held):
    model = peft.get_peft_model(model, config(held))
    hotswap_adapter(model, folder, "default", torch_device="cpu")
    return model


def as_pickle(model, folder, held):
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    return through_transformers(model, folder, held, use_safetensors=False)


ROADS = {
    "`PeftModel.from_pretrained`": lambda m, d, held: peft.PeftModel.from_pretrained(m, d),
    "the same with `config=`": lambda m, d, held: peft.PeftModel.from_pretrained(m, d, config=config(held)),
    "after `PeftConfig.from_pretrained(d).save_pretrained(d)`": forgetful(
        lambda d, held: peft.PeftConfig.from_pretrained(d).save_pretrained(d)
    ),
    "after `LoraConfig(...).save_pretrained(d)`": forgetful(lambda d, held: config(held).save_pretrained(d)),
    "`get_peft_model`, `set_peft_model_state_dict`": lambda m, d, held: set_state(
        peft.get_peft_model(m, config(held)), load_file(d / "adapter_model.safetensors")
    ),
    "`inject_adapter_in_model`, `set_peft_model_state_dict`": lambda m, d, held: set_state(
        peft.inject_adapter_in_model(config(held), m), without_prefix(d)
    ),
    "`PeftModel.load_adapter`, as the second": as_second,
    "`hotswap_adapter`": swapped,
    "transformers' `load_adapter`": through_transformers,
    "the same with `peft_config=`": lambda m, d, held: through_transformers(m, d, held, peft_config=config(held)),
    "the same with `adapter_state_dict=`": lambda m, d, held: through_transformers(
        m, None, held, peft_config=config(held), adapter_state_dict=without_prefix(d)
    ),
    "the same, weights in `adapter_model.bin`": as_pickle,
}


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


THROUGH_TRANSFORMERS = [*ROADS][-4:-1]


def trained(held, folder):
    """(a base, what a model with an adapter over a learned filter of it gives, its adapter in ``folder``)."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(FAMILIES["llama"].config).eval()
    model = patch_model(copy.deepcopy(base), GFSAConfig(K=3))
    model = learned(peft.get_peft_model(model if held else learned(model), config(held)))
    model.save_pretrained(folder)
    return base, logits(model)


def modules(model):
    return [(name, type(module).__name__) for name, module in model.named_modules()]


def outcome(road, held, over, folder):
    base, expected = trained(held, folder)
    model = BASES[over](copy.deepcopy(base))
    before, values, had = modules(model), logits(model), vars(model.config).keys()
    try:
        result = ROADS[road](model, folder, held)
    except GraphFilterError:
        if "`get_peft_model" not in road and "inject" not in road and "second" not in road and "hotswap" not in road:
            assert modules(model) == before, "a failed call leaves the model as it was"
            assert vars(model.config).keys() == had
            assert torch.equal(logits(model), values)
        return "refused"
    return "right" if torch.allclose(logits(result), expected, atol=1e-5) else "WRONG"


def rows(held):
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        for i, road in enumerate(ROADS):
            yield [road, *(outcome(road, held, over, Path(folder, f"{i}-{j}")) for j, over in enumerate(BASES))]


def written():
    """{(road, held): [outcome per base]} as docs/peft.md has them."""
    table = PAGE.read_text().partition(MARKS[0])[2].partition(MARKS[1])[0]
    found, held = {}, False
    for line in table.splitlines():
        held = held or line.startswith("### An adapter that holds")
        road, *cells = (cell.strip() for cell in line.strip("| ").split("|"))
        if road in ROADS:
            found[road, held] = cells
    return found


@pytest.mark.parametrize("over", BASES)
@pytest.mark.parametrize("held", [False, True], ids=["not held", "held"])
@pytest.mark.parametrize("road", ROADS)
def test_an_adapter_is_right_or_refused(road, held, over, tmp_path):
    if held and TRANSFORMERS_5_17 and road in THROUGH_TRANSFORMERS:
        pytest.skip("it loads no modules_to_save: refused")
    found = outcome(road, held, over, tmp_path)
    assert found != "WRONG"
    assert found == written()[road, held][[*BASES].index(over)], "python tests/test_roads.py writes the page"


@pytest.mark.parametrize("load", ["`PeftModel.from_pretrained`", "transformers' `load_adapter`", "`hotswap_adapter`"])
def test_coefficients_that_are_not_finite_are_refused(load, tmp_path):
    base, _ = trained(True, tmp_path)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    weights["base_model.model.model.layers.1.self_attn.graph_filter.w_K"].fill_(torch.nan)
    save_file(weights, tmp_path / "adapter_model.safetensors", metadata={"format": "pt"})
    before = modules(base)
    with pytest.raises(GraphFilterError, match="w_K holds NaN or infinity"):
        ROADS[load](patch_model(base, GFSAConfig(K=3)) if "hot" in load else base, tmp_path, True)
    assert "hot" in load or modules(base) == before


def test_the_record_survives_casts_and_means_of_adapters(tmp_path):
    base, expected = trained(False, tmp_path)
    right = peft.get_peft_model(BASES["the filter as trained"](copy.deepcopy(base)), config(False))
    wrong = peft.get_peft_model(BASES["the filter at its start values"](copy.deepcopy(base)), config(False))
    state = load_file(tmp_path / "adapter_model.safetensors")
    half = {key: tensor.to(torch.bfloat16) for key, tensor in state.items()}
    scaled = {key: 0.95 * (0.9 * tensor + 0.1 * tensor) for key, tensor in state.items()}
    for weights in (half, scaled):
        set_state(right, weights)
        with pytest.raises(GraphFilterError, match="whose coefficients it does not hold"):
            set_state(wrong, weights)
    set_state(wrong, {key: torch.zeros_like(tensor) for key, tensor in state.items()})  # as a running mean begins
    key = next(key for key in state if "record" in key)
    with pytest.raises(GraphFilterError, match="record is damaged"):
        set_state(right, {**state, key: state[key].flip(0)})
    assert set_state(right, state) is right
    torch.testing.assert_close(logits(right), expected)


def test_an_adapter_that_was_converted_to_lora_says_its_filter(tmp_path):
    torch.manual_seed(0)
    base = LlamaForCausalLM(FAMILIES["llama"].config).eval()
    options = peft.LoHaConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(BASES["the filter as trained"](copy.deepcopy(base)), options)
    peft.save_as_lora(tmp_path, model, rank=8)
    for over, make in BASES.items():
        if over == "the filter as trained":
            peft.PeftModel.from_pretrained(make(copy.deepcopy(base)), tmp_path)
        else:
            with pytest.raises(GraphFilterError, match="was trained on a model with"):
                peft.PeftModel.from_pretrained(make(copy.deepcopy(base)), tmp_path, config=config(False))


@pytest.mark.filterwarnings("ignore:PiSSA changes the base weights")
@pytest.mark.parametrize("held", [True, False])
def test_an_adapter_that_was_converted_from_pissa_has_its_filter(held, tmp_path):
    torch.manual_seed(0)
    base = LlamaForCausalLM(FAMILIES["llama"].config).eval()
    options = config(held)
    options.init_lora_weights = "pissa"
    model = peft.get_peft_model(BASES["the filter as trained"](copy.deepcopy(base)), options)
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "first")
    model.peft_config["default"].init_lora_weights = "pissa"
    learned(model)
    expected = logits(model)
    model.save_pretrained(tmp_path, path_initial_model_for_weight_conversion=str(tmp_path / "first"))
    right = peft.PeftModel.from_pretrained(BASES["the filter as trained"](copy.deepcopy(base)), tmp_path)
    torch.testing.assert_close(logits(right), expected, atol=1e-4, rtol=1e-4)
    if not held:
        with pytest.raises(GraphFilterError, match="whose coefficients it does not hold"):
            peft.PeftModel.from_pretrained(BASES["the filter at its start values"](base), tmp_path)


def test_a_weighted_sum_of_adapters_has_the_filter_of_the_one_that_holds_it():
    torch.manual_seed(0)
    model = patch_model(LlamaForCausalLM(FAMILIES["llama"].config), GFSAConfig(K=3))
    model = learned(peft.get_peft_model(model, config(True)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "original_module" in name:
                parameter.zero_()
    model.add_adapter("second", config(False))
    expected, before = logits(model), modules(model)
    with pytest.raises(GraphFilterError, match="name that one first"):
        model.add_weighted_adapter(["second", "default"], [0.0, 1.0], "sum", combination_type="linear")
    assert modules(model) == before
    model.add_weighted_adapter(["default", "second"], [1.0, 0.0], "sum", combination_type="linear")
    model.set_adapter("sum")
    torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-4)


def write_page():
    tables = [
        f"### An adapter that {does} the filter\n\n" + markdown_table(["way", *BASES], [*rows(held)])
        for held, does in ((False, "does not hold"), (True, "holds"))
    ]
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    PAGE.write_text(f"{before}{MARKS[0]}\n" + "\n\n".join(tables) + f"\n{MARKS[1]}{after}")


if __name__ == "__main__":
    write_page()
    sys.exit("WRONG" in PAGE.read_text())
