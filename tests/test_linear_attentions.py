"""Linear Transformer and Performer: their feature maps against the formulas of the papers."""

import copy

import pytest
import torch
from models import FAMILIES
from torch.nn.functional import elu

from hf_graphfilter import GraphFilterError, LinearTransformerConfig, PerformerConfig, patch_model
from hf_graphfilter.filters.linear_transformer import _log_map
from hf_graphfilter.filters.performer import orthogonal_directions


def test_the_log_map_is_the_logarithm_of_elu_plus_one():
    x = torch.tensor([-800.0, -3.0, -0.0, 0.0, 1e-9, 2.0, 1e30], dtype=torch.float64, requires_grad=True)
    found = _log_map(x)
    torch.testing.assert_close(found[1:], (elu(x) + 1).log()[1:])
    assert found[0] == -800, "no underflow"
    found.sum().backward()
    torch.testing.assert_close(x.grad, torch.where(x > 0, 1 / (1 + x), 1.0).detach())


def test_directions_are_orthogonal_in_blocks_with_normal_lengths():
    directions = orthogonal_directions(600, 8, seed=3)
    gram = directions[:8] @ directions[:8].T
    torch.testing.assert_close(gram, gram.diagonal().diag())
    assert directions.square().sum(-1).mean() == pytest.approx(8, rel=0.05)
    assert directions.mean(0).abs().max() < 0.15
    assert not torch.equal(directions, orthogonal_directions(600, 8, seed=4))


def test_performer_comes_near_softmax_attention_with_more_features():
    """Theorem 4 of the paper: the error falls as one over the root of the number of features."""
    model, inputs = FAMILIES["bert"].build(), FAMILIES["bert"].inputs(torch.float32)
    expected = model(**inputs)[0]
    errors = []
    for features in (4, 64, 1024):
        patched = patch_model(copy.deepcopy(model), "performer", features=features)
        errors.append((patched(**inputs)[0] - expected).norm().item())
    assert errors[0] > 2 * errors[1] > 4 * errors[2] > 0


def test_layers_and_seeds_draw_their_own_directions_and_leave_the_global_generator_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    orthogonal_directions(8, 4, seed=0)
    assert torch.equal(torch.get_rng_state(), before)

    def drawn(**options):
        model = patch_model(FAMILIES["bert"].build(), "performer", features=5, **options)
        return [buffer for name, buffer in model.named_buffers() if name.endswith("directions")]

    first, again, other = drawn(), drawn(), drawn(seed=1)
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))
    assert not torch.equal(first[0], first[1])


def test_neither_has_parameters_and_the_directions_are_saved(tmp_path):
    for config in (LinearTransformerConfig(), PerformerConfig(features=5, seed=7)):
        model = patch_model(FAMILIES["bert"].build(), config)
        assert not [name for name, _ in model.named_parameters() if "graph_filter" in name]
        for name, buffer in model.named_buffers():
            if name.endswith("directions"):
                buffer.mul_(2)
        model.save_pretrained(tmp_path / config.filter)
        again = type(model).from_pretrained(tmp_path / config.filter)
        inputs = FAMILIES["bert"].inputs(torch.float32)
        assert torch.equal(again.eval()(**inputs)[0], model.eval()(**inputs)[0])


@pytest.mark.parametrize("options", [{"features": 0}, {"features": 5000}, {"seed": -1}])
def test_performer_refuses_what_it_cannot_draw(options):
    with pytest.raises(GraphFilterError, match=next(iter(options))):
        PerformerConfig(**options)
