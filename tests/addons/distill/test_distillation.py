"""The divergence of distillation against TRL's, sums written out by hand, and its limits."""

import math

import pytest
import torch

from dschat_lora.addons.distill.divergence import generalized_jsd, with_one_rest

P, Q = [0.5, 0.3, 0.2], [0.1, 0.6, 0.3]


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def jsd(p, q, beta):
    """Of the student's ``p`` and the teacher's ``q``, from the definition."""
    m = [beta * b + (1 - beta) * a for a, b in zip(p, q, strict=True)]
    return {0.0: kl(q, p), 1.0: kl(p, q)}.get(beta, beta * kl(q, m) + (1 - beta) * kl(p, m))


def logs(values):
    return torch.tensor(values, dtype=torch.float64).log()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("beta", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_value_and_gradient_are_those_of_trl(beta, temperature):
    trl = pytest.importorskip("trl.experimental.gkd")
    generator = torch.Generator().manual_seed(3)
    student = (3 * torch.randn(2, 5, 11, generator=generator)).requires_grad_()
    teacher = 3 * torch.randn(2, 5, 11, generator=generator)
    labels = torch.tensor([[-100, -100, 3, 1, 2], [-100, 4, 4, 0, -100]])
    theirs = trl.GKDTrainer.generalized_jsd_loss(
        student, teacher, labels, beta=beta, temperature=temperature
    )
    expected = torch.autograd.grad(theirs, student)[0]
    own, other = ((x / temperature).log_softmax(-1) for x in (student, teacher))
    divergence = generalized_jsd(own, other, beta=beta)[labels != -100].mean()
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(divergence, theirs, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(
        torch.autograd.grad(divergence, student)[0], expected, rtol=1e-5, atol=1e-7
    )


@pytest.mark.smoke
@pytest.mark.parametrize("beta", [0.0, 0.25, 1.0], ids=["forward", "mixture", "reverse"])
def test_three_tokens_by_hand(beta):
    divergence = generalized_jsd(logs(P), logs(Q), beta=beta).item()
    assert divergence == pytest.approx(jsd(P, Q, beta), abs=1e-12)


def test_a_small_share_divided_by_itself_tends_to_the_forward_and_reverse_divergences():
    tiny = 1e-6
    forward = generalized_jsd(logs(P), logs(Q), beta=tiny).item() / tiny
    reverse = generalized_jsd(logs(P), logs(Q), beta=1 - tiny).item() / tiny
    assert forward == pytest.approx(kl(Q, P), rel=1e-4)
    assert reverse == pytest.approx(kl(P, Q), rel=1e-4)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_tokens_that_neither_has_add_nothing(beta):
    student = torch.tensor([1.0, 2.0, -math.inf], requires_grad=True)
    teacher = torch.tensor([0.5, 0.0, -math.inf])
    divergence = generalized_jsd(student.log_softmax(-1), teacher.log_softmax(-1), beta=beta)
    expected = generalized_jsd(student[:2].log_softmax(-1), teacher[:2].log_softmax(-1), beta=beta)
    torch.testing.assert_close(divergence, expected)
    (gradient,) = torch.autograd.grad(divergence, student)
    assert gradient[:2].isfinite().all()
    assert gradient[2] == 0


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_beside_the_likeliest_tokens_of_the_teacher_all_others_are_one(beta):
    generator = torch.Generator().manual_seed(5)
    student, teacher = (
        (3 * torch.randn(4, 9, generator=generator, dtype=torch.float64)).requires_grad_()
        for _ in range(2)
    )
    own, other = student.log_softmax(-1), teacher.log_softmax(-1)
    divergence = generalized_jsd(*with_one_rest(own, other, top_k=3), beta=beta)
    for row in range(4):
        chosen = sorted(range(9), key=lambda n: -other[row, n].item())[:3]
        p, q = (
            [each[row, n].exp().item() for n in chosen] for each in (own.detach(), other.detach())
        )
        expected = jsd([*p, 1 - sum(p)], [*q, 1 - sum(q)], beta)
        assert divergence[row].item() == pytest.approx(expected, abs=1e-9)

    def of(x, top_k, y=other):
        return generalized_jsd(*with_one_rest(x, y, top_k=top_k), beta=beta)

    whole = generalized_jsd(own, other, beta=beta)
    assert (divergence <= whole + 1e-12).all()
    torch.testing.assert_close(of(own, 8), whole)
    torch.testing.assert_close(of(own, 9), whole, rtol=0, atol=0)
    fixed = other.detach()
    assert torch.autograd.gradcheck(lambda x: of(x.log_softmax(-1), 3, fixed).sum(), (student,))


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match=r"student \(3,\) and teacher \(2,\)"):
        generalized_jsd(logs(P), logs(Q)[:2], beta=0.5)
    with pytest.raises(ValueError, match=r"beta must be in \[0, 1\], got 1.5"):
        generalized_jsd(logs(P), logs(Q), beta=1.5)
