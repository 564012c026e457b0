"""PPO, RLOO and GRPO in the plainest way: four models of their own, full logits, slow loops."""

import math

import peft
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from helpers.pairs import plain_scores

BETAS, EPSILON = (0.9, 0.95), 1e-8


def stock(auto, base, adapter, *, trained=False, **options):
    """transformers' model under PEFT's adapter, nothing shared with any other."""
    model = auto.from_pretrained(base, **options)
    model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=trained)
    return model.eval()


def stock_policy(base, adapter, *, trained=False):
    return stock(AutoModelForCausalLM, base, adapter, trained=trained)


def stock_scorer(base, adapter, *, trained=False):
    return stock(AutoModelForSequenceClassification, base, adapter, trained=trained, num_labels=1)


def said_of(model, prompt, tokens, temperature=1.0):
    """(log-probabilities, entropies) of a response's tokens, from whole rows of logits."""
    ids = [*prompt, *tokens]
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] / temperature
    over_tokens = torch.distributions.Categorical(logits=logits[len(prompt) - 1 : -1])
    return over_tokens.log_prob(torch.tensor(tokens)), over_tokens.entropy()


def values_of(model, prompt, tokens):
    """Value of the state before each token of a response."""
    scores = plain_scores(model.get_base_model(), [*prompt, *tokens])
    return scores[len(prompt) - 1 : -1]


def score_of(model, prompt, tokens):
    """The reward model's own logit of the whole sequence."""
    return model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, 0]


LONGEST = 9  # tokens of a response, which Dr. GRPO divides by
# What the losses of responses are divided by: the tokens of all, or the responses.
NORMALIZED = {
    **dict.fromkeys(("ppo", "rloo", "grpo", "dapo", "cispo", "reinforce_pp"), "token"),
    "gspo": "sequence",
    "dr_grpo": "constant",
}
ALONE = ("ppo", "reinforce_pp")  # responses are not compared


class PlainRun:
    """Several iterations; every number is a Python float.

    Args:
        base, actor, reward: directories of the base, the actor's adapter and the reward model's.
        algorithm: of those in :data:`NORMALIZED`.
        options: of PPO by their names in the command line, with ``temperature``.
        rate: of both optimizers.
        max_grad_norm: of both.
        ptx: weight of text, if there is any.
    """

    def __init__(self, base, actor, reward, *, algorithm, options, rate, max_grad_norm, ptx=0.0):
        self.o, self.algorithm, self.ptx = options, algorithm, ptx
        self.actor = stock_policy(base, actor, trained=True)
        self.reference = stock_policy(base, actor)
        self.critic = stock_scorer(base, reward, trained=True) if algorithm == "ppo" else None
        self.reward = stock_scorer(base, reward)
        self.learners = {"actor": self.actor}
        if self.critic is not None:
            self.learners["critic"] = self.critic
        self.max_grad_norm, self.rate = max_grad_norm, rate
        self.optimizers = {
            name: torch.optim.AdamW(
                self.trained(name).values(), lr=rate, betas=BETAS, eps=EPSILON, weight_decay=0.0
            )
            for name in self.learners
        }
        self.averages = {n: p.detach().clone() for n, p in self.trained("actor").items()}

    def trained(self, role):
        return {n: p for n, p in self.learners[role].named_parameters() if p.requires_grad}

    @torch.no_grad()
    def look(self, responses, bonus):
        """What all say of each response before anything is learnt."""
        seen = []
        for (prompt, tokens, group), more in zip(responses, bonus, strict=True):
            old, _ = said_of(self.actor, prompt, tokens, self.o["temperature"])
            reference, _ = said_of(self.reference, prompt, tokens, self.o["temperature"])
            each = {"group": group, "old": old.tolist(), "reference": reference.tolist()}
            each["score"] = float(score_of(self.reward, prompt, tokens)) + more
            each["kl"] = [p - q for p, q in zip(each["old"], each["reference"], strict=True)]
            if self.critic is not None:
                each["values"] = values_of(self.critic, prompt, tokens).tolist()
            seen.append(each)
        return seen

    def find_targets(self, seen):
        """Advantages (and returns) of the responses that count, in place."""
        kept = [each for each in seen if not math.isnan(each["score"])]
        for each in kept:
            each["advantages"] = self._advantages(each, kept)
        if self.algorithm == "reinforce_pp" or (
            self.algorithm == "ppo" and self.o["whiten_advantages"]
        ):
            every = [a for each in kept for a in each["advantages"]]
            mean = sum(every) / len(every)
            variance = sum((a - mean) ** 2 for a in every) / len(every)
            for each in kept:
                deviation = math.sqrt(variance + 1e-8)
                each["advantages"] = [(a - mean) / deviation for a in each["advantages"]]

    def _advantages(self, each, kept):
        length, beta = len(each["old"]), self.o["kl_coef"]
        if self.algorithm == "ppo":
            rewards = [-beta * kl for kl in each["kl"]]
            rewards[-1] += each["score"]
            values = [*each["values"], 0.0]
            discount, trace = self.o["gamma"], self.o["lam"]
            deltas = [rewards[t] + discount * values[t + 1] - values[t] for t in range(length)]
            advantages = [
                sum((discount * trace) ** (k - t) * deltas[k] for k in range(t, length))
                for t in range(length)
            ]
            each["returns"] = [a + v for a, v in zip(advantages, values[:-1], strict=True)]
            return advantages
        if self.algorithm == "reinforce_pp":
            rewards = [-beta * kl for kl in each["kl"]]
            rewards[-1] += each["score"]
            discount = self.o["gamma"]
            return [
                sum(discount ** (k - t) * rewards[k] for k in range(t, length))
                for t in range(length)
            ]
        pull = beta if self.algorithm == "rloo" else 0.0
        family = [other for other in kept if other["group"] == each["group"]]
        worth = {id(other): other["score"] - pull * sum(other["kl"]) for other in family}
        if len(family) == 1:
            return [0.0] * length
        own = worth[id(each)]
        if self.algorithm == "rloo":
            others = [value for key, value in worth.items() if key != id(each)]
            return [own - sum(others) / len(others)] * length
        mean = sum(worth.values()) / len(family)
        if self.algorithm == "dr_grpo":
            return [own - mean] * length
        deviation = math.sqrt(sum((w - mean) ** 2 for w in worth.values()) / (len(family) - 1))
        return [(own - mean) / (deviation + 1e-4)] * length

    def step(self, responses, seen, numbers, texts=None, *, decay=None, factor=1.0):
        """What an optimizer step on these responses did; None if none of them counts."""
        numbers = [n for n in numbers if not math.isnan(seen[n]["score"])]
        tokens = sum(len(seen[n]["old"]) for n in numbers)
        if not tokens:
            return None
        divisor = tokens if NORMALIZED[self.algorithm] == "token" else len(numbers)
        sums = dict.fromkeys(
            ("policy_loss", "value_loss", "entropy", "clip_fraction", "value_clip_fraction"), 0.0
        )
        sums |= {"approx_kl": 0.0, "loss": 0.0}
        error = 0.0
        for n in numbers:
            prompt, answer, _ = responses[n]
            loss, worst = self._policy_terms(prompt, answer, seen[n], sums)
            (loss / divisor).backward()
            error = max(error, worst)
            if self.critic is not None:
                (self._value_terms(prompt, answer, seen[n], sums) / tokens).backward()
        report = {name: value / tokens for name, value in sums.items()}
        report |= {name: sums[name] / divisor for name in ("loss", "policy_loss")}
        if texts is not None:
            report["text_loss"] = self._text(next(texts))
        report |= {"num_tokens": tokens, "ratio_error": error}
        for name, optimizer in self.optimizers.items():
            limit = self.max_grad_norm or math.inf
            norm = torch.nn.utils.clip_grad_norm_(self.trained(name).values(), limit)
            report[f"{name}_norm"] = float(norm)
            for group in optimizer.param_groups:
                group["lr"] = self.rate * factor
            optimizer.step()
            optimizer.zero_grad()
        if decay is not None:
            for name, weight in self.trained("actor").items():
                average = self.averages[name]
                self.averages[name] = decay * average + (1 - decay) * weight.detach()
        return report

    def _policy_terms(self, prompt, answer, seen, sums):
        logprobs, entropies = said_of(self.actor, prompt, answer, self.o["temperature"])
        total, worst, length = 0.0, 0.0, len(answer)
        weight = {"token": 1, "sequence": 1 / length, "constant": 1 / LONGEST}
        gaps = [logprobs[t] - seen["old"][t] for t in range(length)]
        for t in range(length):
            ratio, advantage = torch.exp(gaps[t]), seen["advantages"][t]
            whole = torch.exp(sum(gaps) / length) if self.algorithm == "gspo" else ratio
            loss, held = self._surrogate(whole, advantage, logprobs[t])
            sums["clip_fraction"] += held
            loss = loss - self.o["entropy_coef"] * entropies[t]
            share = weight[NORMALIZED[self.algorithm]]
            sums["policy_loss"] += share * loss.item()
            if self.algorithm not in ("rloo", *ALONE):
                gap = seen["reference"][t] - logprobs[t]
                loss = loss + self.o["kl_coef"] * (torch.exp(gap) - gap - 1)
            loss = share * loss
            total = total + loss
            sums["loss"] += loss.item()
            sums["entropy"] += entropies[t].item()
            sums["approx_kl"] += ratio.item() - 1 - math.log(ratio.item())
            worst = max(worst, abs(ratio.item() - 1))
        return total, worst

    def _surrogate(self, ratio, advantage, logprob):
        """The loss of a token, and whether its ratio is at a bound."""
        low, high = (self.o.get(f"cliprange_{at}", self.o["cliprange"]) for at in ("low", "high"))
        near = min(max(ratio.item(), 1 - low), 1 + high)
        if self.algorithm == "cispo":
            return -near * advantage * logprob, near != ratio.item()
        held = near * advantage < ratio.item() * advantage
        # held back, the objective is a constant of the parameters
        return (torch.tensor(-near * advantage) if held else -ratio * advantage), held

    def _value_terms(self, prompt, answer, seen, sums):
        values, total, clip = values_of(self.critic, prompt, answer), 0.0, self.o["cliprange_value"]
        for t in range(len(answer)):
            old, wanted = seen["values"][t], seen["returns"][t]
            near = min(max(values[t].item(), old - clip), old + clip)
            held = (near - wanted) ** 2 > (values[t].item() - wanted) ** 2
            error = near - wanted if held else values[t] - wanted
            loss = torch.as_tensor(error) ** 2 / 2
            total = total + loss
            sums["value_clip_fraction"] += held
            sums["value_loss"] += loss.item()
        # where every value is held back there is nothing to feed back
        return total + 0.0 * values.sum()

    def _text(self, texts):
        """Feeds back the mean loss of texts with its weight; returns the mean."""
        count = sum(len(ids) - 1 for ids in texts)
        mean = 0.0
        for ids in texts:
            loss = -said_of(self.actor, ids[:1], ids[1:])[0].sum() / count
            (self.ptx * loss).backward()
            mean += loss.item()
        return mean
