"""The two processes of test_distributed.py, started by processes.py with MODE FILTER DIR."""

import copy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, DistributedType
from filters import FILTERS
from models import FAMILIES, output, turn_on
from test_trainer import Toy
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModel, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

from hf_graphfilter import (
    CoefficientCallback,
    ConverterConfig,
    ConverterForSequenceClassification,
    GraphFilterError,
    filter_optimizer,
    filter_parameters,
    filter_status,
    load_filter,
    patch_model,
    save_filter,
)
from hf_graphfilter.filters.core.attached import filters_of
from hf_graphfilter.hosts.transformers.cache import NAME as CACHE
from hf_graphfilter.patching.status import has_moved

ZERO3 = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_allow_untested_optimizer": True,  # filter_optimizer builds it, with the filter in a group of its own
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
BLOCKS = ("BertLayer", "ConverterLayer", "LlamaDecoderLayer", "T5Block", "ViTLayer")


def gathered(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def patched(family, name):
    set_seed(0)
    return turn_on(FAMILIES[family].patch(FAMILIES[family].build(), FILTERS[name]), scale=0.2)


def loss(model, inputs, rows=slice(None)):
    """Of whole batches, with weights that normalisation leaves a gradient."""
    found = output(model, {name: x[rows] for name, x in inputs.items()})
    weights = torch.randn(4, *found.shape[1:], generator=torch.Generator().manual_seed(3), dtype=found.dtype)
    return (found * weights[rows]).sum()


def assert_gradients(model, reference):
    expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    for name, parameter in model.named_parameters():
        if name in expected:
            grad = torch.zeros_like(expected[name]) if parameter.grad is None else gathered(parameter.grad)
            torch.testing.assert_close(grad, expected[name], atol=1e-6, rtol=1e-6)


def sharded(model):
    for module in model.modules():
        if type(module).__name__ in BLOCKS:
            fully_shard(module)
    return fully_shard(model)


def sharded_apart(model):
    """As transformers shards what stays in float32 beside bfloat16."""
    for _, graph_filter in filters_of(model):
        fully_shard(graph_filter)
    return sharded(model)


def gradients(name, folder, rank):
    """Equal to those of a single process; the coefficients are read, stored and refused whole."""
    for family in ("bert", "t5", "vit") if FILTERS[name].encoders_only else ("bert", "llama", "t5", "vit"):
        reference, inputs = patched(family, name).double(), FAMILIES[family].inputs(torch.float64, batch=4)
        reference.config.use_cache = False
        rows = slice(2 * rank, 2 * rank + 2)
        for wrap in (lambda m: DistributedDataParallel(m, find_unused_parameters=True), sharded):
            model = copy.deepcopy(reference)
            reference.zero_grad()
            loss(reference, inputs).backward()
            run = wrap(model)
            (2 * loss(run, inputs, rows)).backward()  # gradients are averaged over the processes
            assert_gradients(model, reference)
        assert all(hasattr(p, "full_tensor") for p in filter_parameters(model)), "the filter is sharded with the rest"
        assert str(filter_status(model)) == str(filter_status(reference))
        save_filter(model, folder / family)
        dist.barrier()
        again = load_filter(patched(family, name).double(), folder / family)
        assert str(filter_status(again)) == str(filter_status(reference))
        with pytest.raises(GraphFilterError, match="sharded"):
            load_filter(model, folder / family)
        with pytest.raises(GraphFilterError, match="sharded"):
            patch_model(sharded(FAMILIES[family].build()))


def coefficients(name, folder, rank):
    """Those that are made of a parameter and numbers are read whole, too."""
    for kind, options in (("polynomial", {}), ("arma", {"order": 2}), ("agf", {"theta": "per_head"})):
        reference = patch_model(FAMILIES["bert"].build(), kind, **options)
        for shard in (sharded, sharded_apart):
            model = shard(copy.deepcopy(reference))
            assert str(filter_status(model)) == str(filter_status(reference))
            assert not has_moved(model)
            model(**FAMILIES["bert"].inputs())  # the filters are as they were


def tensor_parallel(name, folder, rank):
    """The coefficients follow the heads: same outputs, gradients and decoding; a filter that cannot is refused."""
    reference, inputs = patched("llama", name).double(), FAMILIES["llama"].inputs(batch=4)
    if rank == 0:
        reference.save_pretrained(folder / "model")
    dist.barrier()
    try:
        from transformers.distributed import DistributedConfig

        options = {"distributed_config": DistributedConfig(tp_size=2, tp_plan="auto")}
    except ImportError:  # transformers up to 5.18
        options = {"tp_plan": "auto"}
    model = AutoModel.from_pretrained(folder / "model", **options)
    if not FILTERS[name].config.module.per_head:
        with pytest.raises(GraphFilterError, match="tensor parallelism splits the 4 heads") as caught:
            output(model, inputs)
        (folder / "refused").write_text(str(caught.value))
        return
    torch.testing.assert_close(output(model, inputs), output(reference, inputs), atol=1e-9, rtol=1e-9)
    loss(model, inputs).backward()
    loss(reference, inputs).backward()
    for parameter, expected in zip(filter_parameters(model), filter_parameters(reference), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, atol=1e-6, rtol=1e-6)
    ids = inputs["input_ids"]
    first = model(ids[:, :5], use_cache=True)
    second = model(ids[:, 5:], **{CACHE: first[CACHE]}).last_hidden_state
    torch.testing.assert_close(second, output(reference, {"input_ids": ids})[:, 5:], atol=1e-9, rtol=1e-9)


def converter(name, folder, rank):
    """The Converter model, of padded pairs: gradients of the mean of the batch, and the same after a step, saved."""
    set_seed(0)
    sizes = {"vocab_size": 99, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "num_sequences": 2}
    config = ConverterConfig(**sizes, eta=0.3)
    for option in [option for option in config.to_dict() if option.endswith("dropout")]:
        setattr(config, option, 0.0)
    reference = ConverterForSequenceClassification(config).double().train()
    ids, mask = torch.randint(99, (4, 9)), (torch.arange(9) < torch.tensor([9, 5, 7, 1])[:, None]).long()
    inputs = {"input_ids": ids, "attention_mask": mask, "input_ids_2": ids.flip(0), "attention_mask_2": mask.flip(0)}
    inputs["labels"] = torch.tensor([0, 1, 1, 0])
    own = {name: x[2 * rank : 2 * rank + 2] for name, x in inputs.items()}
    models = [copy.deepcopy(reference) for _ in range(2)]
    whole = reference(**inputs)
    assert whole.kernel_polynomial_loss > 0
    whole.loss.backward()
    runs = [DistributedDataParallel(models[0]), sharded(models[1])]
    for model, run in zip(models, runs, strict=True):
        run(**own).loss.backward()
        assert_gradients(model, reference)
    for model in (*models, reference):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert all(hasattr(p, "full_tensor") for p in models[1].parameters())
    weights = {name: gathered(tensor) for name, tensor in models[1].state_dict().items()}
    for state in (models[0].state_dict(), weights):
        for parameter, expected in reference.state_dict().items():
            torch.testing.assert_close(state[parameter], expected, atol=1e-6, rtol=1e-6)
    if rank == 0:
        models[1].save_pretrained(folder, state_dict=weights)
    dist.barrier()
    again = ConverterForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(**inputs).logits, reference.eval()(**inputs).logits, atol=1e-6, rtol=1e-6)


def accelerate_shards_on_the_cpu():
    """accelerate turns FSDP on for GPUs only; all the rest of it runs on the CPU as well.

    A second Trainer makes accelerate's state anew. On a GPU that state has FSDP again, so here it has it too.
    """
    original, last = AcceleratorState.__init__, None

    def __init__(self, *args, fsdp_plugin=None, **kwargs):
        nonlocal last
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        last = fsdp_plugin or last
        if last is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, last

    AcceleratorState.__init__ = __init__


def trainer(mode, name, folder, resume=None):
    set_seed(0)
    model = patch_model(BertForSequenceClassification(FAMILIES["bert"].config), FILTERS[name].config)
    fsdp = {"version": 2, "transformer_layer_cls_to_wrap": ["BertLayer"], "state_dict_type": "SHARDED_STATE_DICT"}
    args = TrainingArguments(
        output_dir=folder,
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        logging_steps=1,
        dataloader_pin_memory=False,
        **{
            "ddp": {"ddp_find_unused_parameters": False},
            "fsdp2": {"fsdp": True, "fsdp_config": fsdp},
            "deepspeed": {"deepspeed": ZERO3},
        }[mode],
    )
    made = Trainer(
        turn_on(model, scale=0.2),
        args,
        train_dataset=Toy(),
        optimizer_cls_and_kwargs=filter_optimizer(args, filter_lr=0.05),
        callbacks=[CoefficientCallback()],
    )
    made.train(resume_from_checkpoint=resume)
    return made


def training(mode, name, folder):
    """The Trainer with accelerate: groups of the optimizer, logs, a checkpoint resumed, a model saved and loaded."""
    if mode == "fsdp2":
        accelerate_shards_on_the_cpu()
    whole = trainer(mode, name, folder / "whole")
    learns = any(graph_filter.learned_coefficients() for _, graph_filter in filters_of(patched("bert", name)))
    assert {g["initial_lr"] for g in whole.optimizer.param_groups} == ({1e-3, 0.05} if learns else {1e-3})
    moved = [e[k] for e in whole.state.log_history for k in e if k.startswith("filter/0/")]
    assert len(moved) >= 4 * learns
    assert len(set(moved)) > 1 or not learns
    resumed = trainer(mode, name, folder / "resumed", resume=str(folder / "whole" / "checkpoint-2"))
    if mode == "fsdp2":
        assert all(hasattr(p, "full_tensor") for m in (whole.model, resumed.model) for p in filter_parameters(m))
    status = str(filter_status(whole.model))
    assert str(filter_status(resumed.model)) == status
    if mode != "deepspeed":  # which leaves empty parameters here
        for found, expected in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
            torch.testing.assert_close(gathered(found.detach()), gathered(expected.detach()), atol=1e-7, rtol=1e-6)
    if mode == "fsdp2":
        whole.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    whole.save_model(folder / "final")
    dist.barrier()
    assert str(filter_status(BertForSequenceClassification.from_pretrained(folder / "final"))) == status


def main():
    mode, name, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if mode in ("gradients", "coefficients", "tensor_parallel", "converter"):
        dist.init_process_group("gloo")
        globals()[mode](name, folder, dist.get_rank())
    else:
        training(mode, name, folder)


if __name__ == "__main__":
    main()
