"""Divergences of two heads in chunks of logits: those of whole logits, with their gradients."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from dschat_lora.addons.distill.divergence import DivergenceHead, generalized_jsd, with_one_rest
from dschat_lora.addons.distill.stage import DistillConfig
from dschat_lora.config.options import parse_config
from dschat_lora.models import causal_lm
from dschat_lora.rl.learn.engines import policies_of
from helpers.tiny import VOCAB, tiny_model

N, TEMPERATURE = 11, 0.8


def models(more=0):
    """A student, and a teacher whose vocabulary has ``more`` rows that stand for no token."""
    student, teacher = tiny_model("llama"), tiny_model("opt")
    if more:
        teacher.resize_token_embeddings(VOCAB + more)
    return student, teacher


def states(seed):
    return torch.randn(N, 32, generator=torch.Generator().manual_seed(seed))


def whole(student, teacher, own, other, beta):
    """Each position's divergence by torch's own functions, of whole logits."""
    heads = [each.get_output_embeddings() for each in (student, teacher)]
    p, q = (
        (head(x)[:, :VOCAB] / TEMPERATURE).log_softmax(-1)
        for head, x in zip(heads, (own, other), strict=True)
    )
    if beta == 1:
        return nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1), p
    if beta == 0:
        return nn.functional.kl_div(p, q, reduction="none", log_target=True).sum(-1), p
    m = (beta * q.exp() + (1 - beta) * p.exp()).log()
    parts = [nn.functional.kl_div(m, x, reduction="none", log_target=True) for x in (q, p)]
    return (beta * parts[0] + (1 - beta) * parts[1]).sum(-1), p


@pytest.mark.parametrize("more", [0, 5], ids=["one vocabulary", "a padded one"])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("trains", [False, True], ids=["frozen head", "head that trains"])
def test_chunks_give_values_and_gradients_of_whole_logits(monkeypatch, beta, more, trains):
    student, teacher = models(more=more)
    for each in (student, teacher):
        each.requires_grad_(trains)
    weight = student.get_output_embeddings().weight
    tokens = torch.arange(N) % VOCAB
    own, other = states(1).requires_grad_(), states(2)
    expected, p = whole(student, teacher, own, other, beta)
    wanted = [own, weight] if trains else [own]
    scale = torch.linspace(0.5, 2, N)
    gradients = torch.autograd.grad((scale * expected).sum(), wanted)
    monkeypatch.setattr(causal_lm, "MAX_CHUNK_LOGITS", 4 * (VOCAB + more))
    head = DivergenceHead(student, teacher, beta=beta)
    assert head.rows == 4  # three chunks, the last of another size
    # Its own, so that ZeRO 3 gathers them once a pass: ranks have unlike numbers of chunks.
    assert {"student_weight", "teacher_weight"} <= {*head._parameters}
    logprobs, entropies, divergences = head(own, other, tokens, TEMPERATURE)
    torch.testing.assert_close(divergences, expected)
    torch.testing.assert_close(logprobs, p[range(N), tokens])
    torch.testing.assert_close(entropies, -(p.exp() * p).sum(-1))
    assert not entropies.requires_grad
    result = torch.autograd.grad((scale * divergences).sum(), wanted)
    for ours, theirs in zip(result, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("larger", ["teacher", "student"])
def test_drawn_tokens_are_compared_over_the_vocabulary_that_both_have(larger):
    """The mean of log p - log q over what may be drawn is the divergence of whole logits."""
    student, teacher = models(more=5)
    pair = (student, teacher) if larger == "teacher" else (teacher, student)
    student, teacher = (each.requires_grad_(False) for each in pair)
    own, other, tokens = states(1).requires_grad_(), states(2), torch.arange(VOCAB)
    expected, p = whole(student, teacher, own, other, 1)
    head = DivergenceHead(student, teacher, beta=1.0)
    torch.testing.assert_close(head(own, other, tokens[:N], TEMPERATURE)[2], expected)
    policies = policies_of(student, teacher, entropy_trains=True)
    for row in range(N):
        (logp, entropies), (logq, _) = (
            policies[role].head(x[row].expand(VOCAB, -1), tokens, TEMPERATURE)
            for role, x in (("actor", own), ("reference", other))
        )
        torch.testing.assert_close((logp.exp() * (logp - logq)).sum(), expected[row])
        assert entropies.requires_grad
        torch.testing.assert_close(entropies[0], -(p[row].exp() * p[row]).sum())
    logits = teacher.get_output_embeddings()(other)
    result = policies["reference"].head.of_logits(logits, tokens[:N], TEMPERATURE)
    of_states = policies["reference"].head(other, tokens[:N], TEMPERATURE)
    torch.testing.assert_close(result, of_states)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_likeliest_tokens_are_the_teachers_at_each_position(monkeypatch, beta):
    """Those of whole logits, in chunks; the teacher has rows more."""
    student, teacher = models(more=5)
    own, other = states(1), states(2)
    monkeypatch.setattr(causal_lm, "MAX_CHUNK_LOGITS", 4 * (VOCAB + 5))
    head = DivergenceHead(student, teacher, beta=beta, top_k=3)
    _, _, result = head(own, other, torch.arange(N) % VOCAB, TEMPERATURE)
    p, q = (
        (each.get_output_embeddings()(x)[:, :VOCAB] / TEMPERATURE).log_softmax(-1)
        for each, x in ((student, own), (teacher, other))
    )
    expected = generalized_jsd(*with_one_rest(p, q, top_k=3), beta=beta)
    torch.testing.assert_close(result, expected)


def test_logits_that_a_model_made_itself_are_taken_as_they_are():
    student, teacher = models()
    own, other, tokens = states(1), states(2), torch.arange(N) % VOCAB
    head = DivergenceHead(student, teacher, beta=0.5)
    logits = [each.get_output_embeddings()(x) for each, x in ((student, own), (teacher, other))]
    result = head(*logits, tokens, TEMPERATURE, are_logits=(True, True))
    mixed = head(logits[0], other, tokens, TEMPERATURE, are_logits=(True, False))
    for a, b, c in zip(result, mixed, head(own, other, tokens, TEMPERATURE), strict=True):
        torch.testing.assert_close(a, c)
        torch.testing.assert_close(b, c)


def test_without_a_position_the_graph_still_spans_the_students_states():
    head = DivergenceHead(*models(), beta=1.0)
    own = states(1)[:0].requires_grad_()
    *_, divergences = head(own, states(2)[:0], torch.arange(0), 1.0)
    assert divergences.shape == (0,)
    assert torch.autograd.grad(divergences.sum(), own)[0].shape == own.shape


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1], ids=["alone", "with entropies"])
@pytest.mark.parametrize("loss", ["reverse_kl", "forward_kl", "jsd"])
def test_estimated_bytes_of_a_chunk_are_those_that_torchs_profiler_counts(
    loss, entropy_coef, monkeypatch
):
    argv = ["--distill_loss", loss, "--entropy_coef", str(entropy_coef)]
    config = parse_config(DistillConfig, argv)
    vocabulary, rows, width = 4096, 64, 4
    monkeypatch.setattr(causal_lm, "MAX_CHUNK_LOGITS", vocabulary * rows)
    sizes = {"hidden_size": width, "intermediate_size": 4, "num_hidden_layers": 1}
    shape = LlamaConfig(vocab_size=vocabulary, num_attention_heads=1, **sizes)
    both = [LlamaForCausalLM(shape).requires_grad_(False) for _ in range(2)]
    head = DivergenceHead(*both, beta=config.reference.beta, entropy_trains=entropy_coef > 0)
    own, other = torch.randn(2, 2 * rows, width).unbind()
    tokens = torch.zeros(2 * rows, dtype=torch.int64)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as result:
        _, entropies, divergences = head(own.requires_grad_(), other, tokens, TEMPERATURE)
        (divergences.sum() - (entropies.sum() if entropy_coef else 0)).backward()
    events = [e for e in result.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda each: each.start_ns())
    changes = torch.tensor([each.nbytes() for each in events])
    per_logit = float(changes.cumsum(0).max()) / (vocabulary * rows)
    assert per_logit == pytest.approx(config.reference.logit_bytes(config), rel=0.01)
