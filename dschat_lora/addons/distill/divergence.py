"""Divergences between the next-token distributions of a student and a teacher."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from dschat_lora.algos.logprobs import token_entropy
from dschat_lora.lora.parallel import ParallelLinear, Split
from dschat_lora.models import causal_lm
from dschat_lora.models.causal_lm import is_plain, whole_logits

if TYPE_CHECKING:
    from dschat_lora.rl.learn.reference import Policies
    from dschat_lora.rl.response.batch import ResponseBatch


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


class _ChunkLogits:
    """An output embedding whose parameters a module holds, and ZeRO 3 gathers once for all chunks.

    Ranks have unlike numbers of chunks. A head that is not plain is called, chunk by chunk.
    """

    def __init__(self, owner: nn.Module, name: str, head: nn.Module) -> None:
        self._owner, self._name, self._plain = owner, name, is_plain(head)
        self._split: Split | None = head.split if isinstance(head, ParallelLinear) else None
        if is_plain(head):
            for each in ("weight", "bias"):
                owner.register_parameter(f"{name}_{each}", head._parameters[each])
        else:
            owner.add_module(f"{name}_head", head)

    def __call__(self, hidden: Tensor) -> Tensor:
        """(N, V) logits after (N, H) hidden states, whole on every rank."""
        if not self._plain:
            logits: Tensor = getattr(self._owner, f"{self._name}_head")(hidden)
            return logits
        weight, bias = (getattr(self._owner, f"{self._name}_{each}") for each in ("weight", "bias"))
        return whole_logits(hidden, weight, bias, self._split)


class DivergenceHead(nn.Module):
    """The output embeddings of a student and a teacher, and how far their softmaxes differ.

    Logits of both are formed for a chunk of positions at a time, and again for the gradient.
    """

    def __init__(
        self,
        student: PreTrainedModel,
        teacher: PreTrainedModel,
        *,
        beta: float,
        top_k: int = 0,
        entropy_trains: bool = False,
    ) -> None:
        """Compare by :func:`generalized_jsd` of this ``beta``.

        With ``top_k`` tokens are told apart as by :func:`with_one_rest`.
        """
        super().__init__()
        self.beta, self.top_k, self.entropy_trains = beta, top_k, entropy_trains
        sizes = [model.config.vocab_size for model in (student, teacher)]
        self.student = _ChunkLogits(self, "student", student.get_output_embeddings())
        self.teacher = _ChunkLogits(self, "teacher", teacher.get_output_embeddings())
        self.vocab_size, self.rows = min(sizes), max(1, causal_lm.MAX_CHUNK_LOGITS // max(sizes))

    def forward(
        self,
        student: Tensor,
        teacher: Tensor,
        tokens: Tensor,
        temperature: float,
        *,
        are_logits: tuple[bool, bool] = (False, False),
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(N,) log-probabilities and entropies of the student, and divergences from the teacher.

        All are fp32, in nats, of logits over ``temperature``, over the smaller vocabulary.
        ``student`` and ``teacher`` are their (N, H) hidden states, or (N, V) logits where
        ``are_logits`` says so, and ``tokens`` the (N,) next ones.
        """

        def of_chunk(own: Tensor, other: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            own, other = (
                (states if done else head(states))[:, : self.vocab_size].float() / temperature
                for states, done, head in zip(
                    (own, other), are_logits, (self.student, self.teacher), strict=True
                )
            )
            table = own.log_softmax(-1)
            with torch.set_grad_enabled(self.entropy_trains and torch.is_grad_enabled()):
                entropies = token_entropy(own)
            if self.top_k:
                few = with_one_rest(table, other.log_softmax(-1), top_k=self.top_k)
                divergences = generalized_jsd(*few, beta=self.beta)
            else:  # no name keeps a table of the size of the logits
                divergences = generalized_jsd(table, other.log_softmax(-1), beta=self.beta)
            return table.gather(1, tokens[:, None]).squeeze(1), entropies, divergences

        parts = (torch.split(each, self.rows) for each in (student, teacher, tokens))
        chunks = [
            checkpoint(of_chunk, *each, use_reentrant=False) for each in zip(*parts, strict=True)
        ]
        logprobs, entropies, divergences = map(torch.cat, zip(*chunks, strict=True))
        return logprobs, entropies, divergences

    def outputs(
        self, network: "Policies", own: "ResponseBatch", read: "ResponseBatch", temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What :meth:`forward` gives of a batch as the actor reads it, and as the teacher does."""
        actor, teacher = network.policy("actor"), network.policy("reference")
        with torch.no_grad():
            other = teacher.before_head(read.logit_positions, *read.inputs, None, read.spans)
        states = actor.before_head(own.logit_positions, *own.inputs, None, own.spans)
        logits = actor.full_logits, teacher.full_logits
        outputs: tuple[Tensor, Tensor, Tensor] = self(
            states, other, own.target_ids, temperature, are_logits=logits
        )
        return outputs
