"""Divergences between the next-token distributions of a student and a teacher."""

import torch
from torch import Tensor


def generalized_jsd(student: Tensor, teacher: Tensor, *, beta: float) -> Tensor:
    """Generalised Jensen-Shannon divergence of two distributions at each position.

    ``beta KL(teacher || m) + (1 - beta) KL(student || m)`` with the mixture
    ``m = beta teacher + (1 - beta) student`` (eq. 1 of arXiv:2306.13649). Divided by ``beta`` it
    tends to the forward KL(teacher || student) for beta to 0, and divided by ``1 - beta`` to the
    reverse KL(student || teacher) for beta to 1: these two stand for beta 0 and 1, undivided.

    Args:
        student: (..., V) log-probabilities, whose gradient is wanted.
        teacher: (..., V) log-probabilities.
        beta: share of the teacher in the mixture, in [0, 1].

    Returns:
        (...) divergences in nats, >= 0, with gradient. Tokens of probability 0 under both add
        nothing.

    Raises:
        ValueError: if the shapes differ, or ``beta`` is out of range.
    """
    if student.shape != teacher.shape:
        raise ValueError(f"student {tuple(student.shape)} and teacher {tuple(teacher.shape)}")
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must be in [0, 1], got {beta}")
    # Without the bound, a token of probability 0 would give 0 times infinity.
    least = torch.finfo(student.dtype).min / 4
    student, teacher = student.clamp(min=least), teacher.clamp(min=least)
    if beta == 0:
        return _kl(teacher, student)
    if beta == 1:
        return _kl(student, teacher)
    share = torch.tensor(beta, dtype=student.dtype, device=student.device)
    mixture = torch.logaddexp(student + torch.log1p(-share), teacher + share.log())
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def with_one_rest(student: Tensor, teacher: Tensor, *, top_k: int) -> tuple[Tensor, Tensor]:
    """Both distributions over the teacher's likeliest tokens, and all others as one outcome.

    A divergence of what is left is at most that of the whole vocabulary (data processing
    inequality), and what either says among the teacher's unlikely tokens counts no more.

    Args:
        student: (..., V) log-probabilities.
        teacher: (..., V) log-probabilities.
        top_k: tokens that are told apart at each position, > 0; from V on nothing changes.

    Returns:
        (..., top_k + 1) log-probabilities of the student and of the teacher, the rest last.
    """
    if top_k >= teacher.shape[-1]:
        return student, teacher
    likeliest = teacher.topk(top_k).indices

    def split(logprobs: Tensor) -> Tensor:
        rest = logprobs.scatter(-1, likeliest, float("-inf")).logsumexp(-1, keepdim=True)
        return torch.cat((logprobs.gather(-1, likeliest), rest), dim=-1)

    return split(student), split(teacher)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)
