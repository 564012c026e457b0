"""The same training in the plainest way: stock PEFT, one sample at a time, torch's AdamW."""

import peft
import torch
import torch.nn.functional as F

from dschat_lora.lora.model import adapter_parameters, lora_layers


def peft_copy_of(adapted, base, lora):
    """Stock PEFT on ``base``, with the adapter weights of ``adapted`` (ours)."""
    layers = lora_layers(adapted)
    theirs = peft.get_peft_model(
        base,
        peft.LoraConfig(
            r=lora.lora_dim,
            lora_alpha=lora.lora_alpha,
            target_modules=list(layers),
            fan_in_fan_out=any(each.transposed for each in layers.values()),
            task_type="CAUSAL_LM",
        ),
    )
    parameters = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, value in adapter_parameters(adapted).items():
            parameters[f"base_model.model.{name}.default.weight"].copy_(value)
    return theirs


def sample_loss(model, sample):
    """(summed cross-entropy, number of targets) of one sample, by the model's own logits."""
    ids = torch.as_tensor(sample.input_ids, dtype=torch.long)[None]
    targets = torch.as_tensor(sample.labels, dtype=torch.long)[1:]
    logits = model(input_ids=ids).logits[0, :-1]
    loss = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    return loss, int((targets != -100).sum())


def accumulate(model, samples):
    """Gradient of the mean loss over all targets of ``samples``; returns that mean."""
    total = sum(sample_loss_count(sample) for sample in samples)
    mean = 0.0
    for sample in samples:
        loss, _ = sample_loss(model, sample)
        (loss / total).backward()
        mean += loss.item() / total
    return mean


def sample_loss_count(sample):
    return sum(int(label) != -100 for label in sample.labels[1:])


def train(
    model, windows, *, rates, max_grad_norm, betas=(0.9, 0.95), epsilon=1e-8, scale=lambda name: 1.0
):
    """(losses, gradient norms) of one optimizer step a window, at ``scale`` of each one's rate."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [{"params": [p], "scale": scale(name)} for name, p in named.items()]
    parameters = [*named.values()]
    optimizer = torch.optim.AdamW(groups, betas=betas, eps=epsilon, weight_decay=0.0)
    losses, norms = [], []
    for window, rate in zip(windows, rates, strict=True):
        losses.append(accumulate(model, window))
        limit = max_grad_norm or float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, limit)))
        for group in optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def mean_loss(model, samples):
    """Mean over all targets of ``samples``."""
    with torch.no_grad():
        results = [sample_loss(model, sample) for sample in samples]
    return float(sum(loss for loss, _ in results)) / sum(number for _, number in results)
