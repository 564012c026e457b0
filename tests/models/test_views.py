"""Trees of modules over the very same weights."""

import pytest
import torch
from torch import nn

from dschat_lora.config.groups import LoraConfig
from dschat_lora.lora.model import apply_lora
from dschat_lora.models.loading import share_parameters
from helpers.tiny import KINDS, tiny_model

IDS = torch.arange(3, 12)[None]


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("kind", KINDS)
def test_a_view_has_every_parameter_and_buffer_itself_and_no_module(kind):
    model = tiny_model(kind)
    view = share_parameters(model)
    for find in (nn.Module.named_parameters, nn.Module.named_buffers):
        # A tied weight is tied in the view.
        ours, theirs = (dict(find(each, remove_duplicate=False)) for each in (view, model))
        assert ours.keys() == theirs.keys()
        assert all(ours[name] is theirs[name] for name in ours)
    assert not set(map(id, view.modules())) & set(map(id, model.modules()))
    assert view.config is not model.config
    assert torch.equal(logits(view), logits(model))


def test_a_changed_value_is_seen_by_both_and_an_adapter_by_one():
    model = tiny_model("llama")
    view, before = share_parameters(model), logits(model)
    apply_lora(view, LoraConfig(lora_dim=2), seed=0)
    with torch.no_grad():
        for name, parameter in view.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    assert torch.equal(logits(model), before)
    assert not torch.equal(logits(view), before)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert torch.equal(view.lm_head.weight, model.lm_head.weight)
    assert not torch.equal(logits(model), before)


def test_hooks_and_modes_of_one_tree_leave_the_other():
    model = tiny_model("opt").eval()
    view, called = share_parameters(model), []
    view.train()
    assert not model.training
    model.register_forward_hook(lambda *_: called.append("model"))
    logits(view)
    assert called == []


def test_gradients_of_both_trees_meet_in_the_weight():
    layer = nn.Linear(3, 1, bias=False)
    view = share_parameters(layer)
    layer(torch.ones(1, 3)).sum().backward()
    view(torch.full((1, 3), 2.0)).sum().backward()
    assert layer.weight.grad.tolist() == [[3.0, 3.0, 3.0]]
