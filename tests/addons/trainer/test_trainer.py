"""The primitives of a training loop of one's own: against stock libraries and plain loops."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from trainer_runs import PROMPTS, options, random_sequences
from transformers import AutoModelForCausalLM

import dschat_lora as dl
from dschat_lora.addons.trainer.trainer import Trainer
from dschat_lora.algos.ppo import cispo_loss
from dschat_lora.assets import BUNDLED_MODEL


@pytest.fixture(scope="module")
def trainer():
    with Trainer(lora_dim=4, seed=1, per_device_train_batch_size=2) as made:
        for step in range(2):  # an adapter that has begun to learn: at first B is 0
            made.forward_backward(random_sequences(4, seed=step))
            made.optim_step(2e-2)
        yield made


def stock(directory):
    """The adapter of a directory on its base, in PEFT."""
    base = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32)
    return PeftModel.from_pretrained(base, directory, is_trainable=True).eval()


@pytest.fixture(scope="module")
def twin(trainer, tmp_path_factory):
    """The same model in PEFT."""
    trainer.export_adapter(directory := tmp_path_factory.mktemp("twin") / "adapter")
    return stock(directory)


def plain_logprobs(model, tokens):
    """Log-probability of each token but the first, as floats with gradient; None for the first."""
    logits = model(input_ids=torch.tensor([tokens])).logits[0]
    table = logits.log_softmax(-1)
    return [None, *(table[t - 1, tokens[t]] for t in range(1, len(tokens)))]


def counted_tokens(sequence):
    """(place, weight) of tokens that count."""
    pairs = enumerate(sequence["weights"])
    return [(t, weight) for t, weight in pairs if t > 0 and weight > 0]


def gradient_norm(model, loss):
    model.zero_grad()
    loss.backward()
    own = [p.grad for p in model.parameters() if p.grad is not None]
    return math.sqrt(sum(float(g.double().square().sum()) for g in own))


def clip(ratio, low, high):
    return torch.clamp(ratio, low, high)


# Each from the formula of its paper, one token after another: the loss of a token from its
# log-probability and the sequence.
def cross_entropy(logprob, s, t, ratio):
    return -logprob


def importance_sampling(logprob, s, t, ratio):
    return -s["advantages"][t] * ratio


def ppo(logprob, s, t, ratio):
    a = s["advantages"][t]
    return -torch.minimum(ratio * a, clip(ratio, 0.8, 1.2) * a)


def ppo_wide(logprob, s, t, ratio):
    a = s["advantages"][t]
    loss = -torch.minimum(ratio * a, clip(ratio, 0.6, 1.9) * a)
    return torch.minimum(loss, torch.tensor(-1.5 * a)) if a < 0 else loss


def ppo_with_kl(logprob, s, t, ratio):
    k = s["ref_logprobs"][t] - logprob
    return ppo(logprob, s, t, ratio) + 0.2 * (torch.exp(k) - k - 1)


def cispo(logprob, s, t, ratio):
    return -s["advantages"][t] * clip(ratio, 0.0, 5.0).detach() * logprob


def sapo(logprob, s, t, ratio):
    a = s["advantages"][t]
    tau = 2.0 if a > 0 else 1.05
    return -a * 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))


def ppo_capped(logprob, s, t, ratio):
    old = s["old_logprobs"][t]
    weight = min(math.exp(old - s["logprobs"][t]), 1.5)
    a = s["advantages"][t]
    own = torch.exp(logprob - old)
    return -weight * torch.minimum(own * a, clip(own, 0.8, 1.2) * a)


def gspo(logprob, s, t, ratio):
    """``ratio`` is one for a sequence."""
    a = s["advantages"][t]
    return -torch.minimum(ratio * a, clip(ratio, 0.9, 1.3) * a)


def own_loss(logprobs, old, advantages, mask):
    return cispo_loss(logprobs, old, advantages, mask, cliprange=1.0, cliprange_high=4.0)


LOSSES = {
    "cross_entropy": ("cross_entropy", {}, cross_entropy),
    "importance_sampling": ("importance_sampling", {}, importance_sampling),
    "ppo": ("ppo", {}, ppo),
    "ppo, wide and dual": (
        "ppo",
        {"cliprange_low": 0.4, "cliprange_high": 0.9, "dual_clip": 1.5},
        ppo_wide,
    ),
    "ppo with k3": ("ppo", {"kl_coef": 0.2}, ppo_with_kl),
    "ppo, importance capped": ("ppo", {"importance_cap": 1.5}, ppo_capped),
    "cispo": ("cispo", {}, cispo),
    "sapo": ("sapo", {"sapo_temperature_pos": 2.0}, sapo),
    "gspo": ("gspo", {"cliprange_low": 0.1, "cliprange_high": 0.3}, gspo),
    "an algorithm's": ("dr_grpo", {}, ppo),
    "an algorithm of one's own": (dl.Algorithm(len, loss=own_loss, loss_options={}), {}, cispo),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_that_of_a_plain_loop(name, trainer, twin):
    loss, settings, of_token = LOSSES[name]
    sequences = near(trainer, random_sequences(5, seed=3))
    parts, total = [], 0.0
    for s in sequences:
        logprobs, places = plain_logprobs(twin, s["tokens"]), counted_tokens(s)
        differences = [logprobs[t] - s["logprobs"][t] for t, _ in places]
        if of_token is gspo:
            differences = [torch.stack(differences).mean()] * len(places)
        for (t, weight), difference in zip(places, differences, strict=True):
            parts.append(weight * of_token(logprobs[t], s, t, torch.exp(difference)))
            total += weight
    check(trainer, twin, sequences, torch.stack(parts).sum() / total, loss, settings)


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_dpo_compares_consecutive_sequences(loss_type, trainer, twin):
    sequences = random_sequences(6, seed=5)
    ratios = []
    for s in sequences:
        logprobs, places = plain_logprobs(twin, s["tokens"]), counted_tokens(s)
        ratio = sum(w * (logprobs[t] - s["ref_logprobs"][t]) for t, w in places)
        ratios.append(ratio / sum(w for _, w in places) if loss_type == "ipo" else ratio)
    margins = [ratios[n] - ratios[n + 1] for n in (0, 2, 4)]
    losses = [-torch.log(torch.sigmoid(0.3 * margin)) for margin in margins]
    if loss_type == "ipo":
        losses = [(margin - 1 / 0.6) ** 2 for margin in margins]
    settings = {"beta": 0.3, "loss_type": loss_type}
    check(trainer, twin, sequences, sum(losses) / 3, "dpo", settings)


def near(trainer, sequences):
    """With log-probabilities that are not far from the policy's, on both sides of every clip."""
    for s, own in zip(sequences, trainer.logprobs(sequences), strict=True):
        for name in ("logprobs", "old_logprobs", "ref_logprobs"):
            s[name] = [p + 0.6 * (n + 7.0) for p, n in zip(own.tolist(), s[name], strict=True)]
    return sequences


def outcome(trainer, sequences, *args, **settings):
    """Loss and norm of the gradient; a rate of 0 leaves the weights as they are."""
    loss = trainer.forward_backward(sequences, *args, **settings)
    return loss, trainer.optim_step(0.0).grad_norm


def check(trainer, twin, sequences, expected, loss, settings):
    """The loss and, by its norm, the gradient."""
    value, norm = outcome(trainer, sequences, loss, **settings)
    assert value == pytest.approx(expected.item(), rel=1e-5)
    assert norm == pytest.approx(gradient_norm(twin, expected), rel=1e-4)


def test_steps_are_those_of_torch_on_a_stock_peft_model(tmp_path):
    settings = {"adam_beta2": 0.97, "weight_decay": 0.1, "max_grad_norm": 0.5}
    with Trainer(lora_dim=4, lora_alpha=8, seed=5, **settings) as trainer:
        trainer.export_adapter(tmp_path / "before")
        model = stock(tmp_path / "before")
        own = [p for p in model.parameters() if p.requires_grad]
        adam = torch.optim.AdamW(own, lr=1e-3, betas=(0.9, 0.97), eps=1e-8, weight_decay=0.1)
        for step in range(4):
            sequences = random_sequences(3, seed=step)
            loss, norm = torch.zeros(()), 0.0
            for s in sequences:
                ids, weights = torch.tensor([s["tokens"]]), torch.tensor(s["weights"][1:])
                logits = model(input_ids=ids).logits[0, :-1]
                each = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
                loss, norm = loss + (each * weights).sum(), norm + weights.sum()
            adam.zero_grad()
            (loss / norm).backward()
            expected = torch.nn.utils.clip_grad_norm_(own, 0.5)
            adam.step()
            assert trainer.forward_backward(sequences) == pytest.approx(
                float(loss.detach() / norm), rel=1e-5
            )
            assert trainer.optim_step(1e-3).grad_norm == pytest.approx(float(expected), rel=1e-4)
        trainer.export_adapter(tmp_path / "after")
        probe = random_sequences(2, seed=9)
        found = trainer.logprobs(probe)
    model.save_pretrained(tmp_path / "torch")
    expected = load_file(tmp_path / "torch" / "adapter_model.safetensors")
    torch.testing.assert_close(
        load_file(tmp_path / "after" / "adapter_model.safetensors"), expected, atol=2e-5, rtol=1e-4
    )
    loaded = stock(tmp_path / "after")
    for s, own in zip(probe, found, strict=True):
        plain = plain_logprobs(loaded, s["tokens"])[1:]
        torch.testing.assert_close(own[1:], torch.stack(plain).detach(), atol=1e-5, rtol=1e-5)


def test_the_first_token_and_those_without_weight_do_not_count(trainer):
    sequences = random_sequences(4, seed=6)
    changed = []
    for s in sequences:
        s["weights"][0] = 0.0
        other = {name: list(values) for name, values in s.items()}
        other["weights"][0] = 5.0  # nothing predicts it
        for t, weight in enumerate(s["weights"]):
            if weight == 0:
                other["advantages"][t] = other["logprobs"][t] = 1e4
        changed.append(other)
    for loss in ("cross_entropy", "importance_sampling", "ppo", "cispo", "gspo"):
        assert outcome(trainer, sequences, loss) == outcome(trainer, changed, loss)


def test_a_loss_of_ones_own_gets_each_sequence_as_it_came(trainer):
    sequences = [{**s, "more": n} for n, s in enumerate(random_sequences(5, seed=7))]
    seen = {}

    def loss(logprobs, sequence):
        seen[sequence["more"]] = logprobs.detach().clone()
        return torch.where(torch.tensor(sequence["weights"]) > 0, -logprobs, math.nan)

    expected = outcome(trainer, sequences)
    assert outcome(trainer, sequences, loss) == pytest.approx(expected, rel=1e-6)
    # The first token does not count here either.
    heavy = [{"tokens": [5, 6, 7], "weights": [9.0, 1.0, 3.0]}]
    values = torch.tensor([7.0, 1.0, 2.0])
    assert trainer.forward_backward(heavy, lambda p, s: values + 0 * p) == 7 / 4
    trainer.optim_step(0.0)
    for n, own in enumerate(trainer.logprobs(sequences)):
        assert own[0] == seen[n][0] == 0
        torch.testing.assert_close(seen[n], own)


def test_the_size_of_a_pass_changes_nothing(trainer, tmp_path):
    sequences = random_sequences(7, seed=8)
    expected = outcome(trainer, sequences)
    logprobs = trainer.logprobs(sequences)
    alone = [trainer.logprobs([each])[0] for each in sequences]
    torch.testing.assert_close(logprobs, alone)
    trainer.save(tmp_path / "state")
    with Trainer(lora_dim=4, seed=1, per_device_train_batch_size=64) as other:
        other.load(tmp_path / "state")
        assert outcome(other, sequences) == pytest.approx(expected, rel=1e-5)
    # An adapter that was exported is continued.
    trainer.export_adapter(tmp_path / "adapter")
    with Trainer(SimpleNamespace(path=tmp_path / "adapter")) as other:
        torch.testing.assert_close(other.logprobs(sequences), logprobs)


def test_several_calls_add_up_their_gradients():
    first, second = random_sequences(3, seed=1), random_sequences(4, seed=2)
    sums = [sum(sum(s["weights"][1:]) for s in each) for each in (first, second)]
    both = [
        {**s, "weights": [w / total for w in s["weights"]]}
        for each, total in zip((first, second), sums, strict=True)
        for s in each
    ]
    with Trainer(**options(0, max_grad_norm=0)) as trainer:
        losses = [trainer.forward_backward(each) for each in (first, second)]
        norm = trainer.optim_step(0.0).grad_norm
        # The weights of each call sum to 1 here: the mean is half the sum of both.
        assert trainer.forward_backward(both) == pytest.approx(sum(losses) / 2, rel=1e-6)
        assert trainer.optim_step(0.0).grad_norm == pytest.approx(norm / 2, rel=1e-5)
        # Nothing is left of them.
        assert trainer.forward_backward(first) == losses[0]
        assert trainer.optim_step(0.0).grad_norm < norm


def test_dropout_depends_on_seed_step_and_call_alone():
    sequences = random_sequences(3)

    def losses(seed):
        with Trainer(lora_dim=4, lora_dropout=0.5, seed=seed) as trainer:
            trainer.forward_backward(sequences)
            trainer.optim_step(5e-2)
            torch.rand(3)
            before = torch.random.get_rng_state()
            values = [trainer.forward_backward(sequences) for _ in range(2)]
            trainer.optim_step(0.0)
            values.append(trainer.forward_backward(sequences))
            assert torch.equal(torch.random.get_rng_state(), before)
            return values

    assert losses(1) == (expected := losses(1))
    assert len(set(expected)) == 3


def test_samples_have_the_log_probabilities_they_were_drawn_with(trainer, twin):
    answers = trainer.sample(PROMPTS, num_samples=3, max_tokens=8, seed=1)
    assert len({len(a.tokens) for each in answers for a in each}) > 1
    for prompt, samples in zip(PROMPTS, answers, strict=True):
        ids = trainer.encode(prompt)
        assert ids == trainer.tokenizer(prompt).input_ids
        whole = trainer.logprobs([{"tokens": ids + a.tokens} for a in samples])
        for answer, own in zip(samples, whole, strict=True):
            assert answer.text == trainer.tokenizer.decode(answer.tokens, skip_special_tokens=True)
            drawn = torch.tensor(answer.logprobs)
            torch.testing.assert_close(drawn, own[len(ids) :], atol=2e-5, rtol=1e-5)
    settings = {"temperature": 0.6, "top_k": 5}
    ((answer,),) = trainer.sample(PROMPTS[:1], max_tokens=6, seed=4, **settings)
    ids = trainer.encode(PROMPTS[0])
    tokens = torch.tensor([ids + answer.tokens])
    with torch.no_grad():
        logits = twin(input_ids=tokens).logits[0, len(ids) - 1 : -1]
    best = logits.topk(5)
    assert all(t in own for t, own in zip(answer.tokens, best.indices, strict=True))
    chosen = logits.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    expected = chosen / 0.6 - torch.logsumexp(best.values / 0.6, -1)
    torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=2e-5, rtol=0)
    greedy = trainer.sample(PROMPTS[:1], num_samples=2, max_tokens=1, temperature=0)
    assert [each.tokens for each in greedy[0]] == [[int(logits[0].argmax())]] * 2


def test_a_sample_depends_on_its_seed_and_not_on_the_others(trainer):
    whole = trainer.sample(PROMPTS, num_samples=4, max_tokens=8, seed=(5, 6))
    numpy = {"num_samples": np.int64(4), "max_tokens": np.int32(8), "seed": (np.int64(5), 6)}
    again = trainer.sample(PROMPTS, **numpy)
    assert whole == again
    assert len({tuple(each.tokens) for each in whole[0]}) > 1
    alone = trainer.sample([PROMPTS[2]], num_samples=2, max_tokens=8, seed=[(5, 6, 2)])
    assert [a.tokens for a in alone[0]] == [a.tokens for a in whole[2][:2]]
    other = trainer.sample(PROMPTS, num_samples=4, max_tokens=8, seed=(5, 7))
    assert [a.tokens for a in other[0]] != [a.tokens for a in whole[0]]


@pytest.mark.smoke
def test_prompts_are_texts_tokens_or_messages(trainer):
    ids = trainer.encode(PROMPTS[0])
    messages = [{"role": "user", "content": "Which is larger, 10 or 16?"}]
    assert trainer.encode(messages) == ids  # by the built-in template
    texts = trainer.sample([PROMPTS[0]], max_tokens=4, seed=[1])
    assert trainer.sample([ids], max_tokens=4, seed=[1]) == texts
    assert trainer.sample([messages], max_tokens=4, seed=[1]) == texts


GOOD = {"tokens": [1, 2, 3], "weights": [0, 1, 1], "logprobs": [0, -1, -1], "advantages": [1, 1, 1]}
MISTAKES = {
    "no sequence": ([], {}, "sequences is empty"),
    "one dict": (GOOD, {}, "sequences must be a list of dicts"),
    "no dict": ([[1, 2]], {}, r"sequences\[0\] must be a dict with 'tokens', got list"),
    "no tokens": ([GOOD, {"weights": [1]}], {}, r"sequences\[1\] lacks 'tokens'"),
    "no advantages": (
        [{"tokens": [1], "weights": [1], "logprobs": [0]}],
        {"loss": "ppo"},
        r"sequences\[0\] lacks 'advantages', which loss 'ppo' reads; it has \['logprobs', ",
    ),
    "empty": ([GOOD | {"tokens": []}], {}, r"sequences\[0\]\['tokens'\] is empty"),
    "unlike": ([GOOD | {"weights": [0, 1]}], {}, r"\['weights'\] has 2 values for 3 tokens"),
    "no token": ([GOOD | {"tokens": [1, 2, 5000]}], {}, r"\['tokens'\] holds 5000, which is no"),
    "below 0": ([GOOD | {"tokens": [1, -2, 5]}], {}, r"\['tokens'\] holds -2, which is no token"),
    "fractions": ([GOOD | {"tokens": [1.5, 2.0, 3.0]}], {}, r"must be a list of whole numbers"),
    "texts": ([GOOD | {"tokens": "abc"}], {}, r"must be a list of whole numbers, got 'abc'"),
    "NaN": ([GOOD | {"weights": [0, math.nan, 1]}], {}, r"\['weights'\]\[1\] is nan"),
    "negative": ([GOOD | {"weights": [0, -1, 1]}], {}, r"\['weights'\] must be 0 or more"),
    "infinite": (
        [GOOD | {"logprobs": [0, -math.inf, 0]}],
        {"loss": "ppo"},
        r"\['logprobs'\]\[1\] is -inf",
    ),
    "nothing counts": ([GOOD | {"weights": [1, 0, 0]}], {}, "no token counts"),
    "too long": (
        [{"tokens": [5] * 999, "weights": [1] * 999}],
        {},
        "999 tokens, and the model has",
    ),
    "no pair": ([GOOD | {"ref_logprobs": [0, 0, 0]}], {"loss": "dpo"}, "got 1 sequences"),
    "unknown": ([GOOD], {"loss": "ppp"}, "one of cross_entropy, .*; did you mean ppo?"),
    "value": ([GOOD], {"loss": "ppo", "cliprange": -1}, "--cliprange must be > 0, got -1"),
    "word": ([GOOD], {"loss": "ppo", "cliprange": "x"}, "--cliprange: must be a number"),
    "shape": ([GOOD], {"loss": lambda p, s: p[1:]}, r"must return a \(3,\) tensor.*got \(2,\)"),
    "no gradient": (
        [GOOD],
        {"loss": lambda p, s: p.detach()},
        "must depend on the given log-probabil",
    ),
}


SAMPLING_MISTAKES = [
    ({"prompts": PROMPTS[0]}, "prompts must be a list of prompts, got one text"),
    ({"prompts": [PROMPTS[0], ""]}, "a prompt is empty"),
    ({"num_samples": 2.0}, r"num_samples must be a whole number, got 2\.0"),
    ({"max_tokens": 0}, "max_tokens must be at least 1"),
    ({"max_tokens": 9999}, r"prompts\[0\] has \d+ tokens: with max_tokens 9999"),
    ({"temperature": -1.0}, "temperature must be at least"),
    ({"num_samples": 0}, "num_samples must be 1 or more"),
    ({"seed": 1.5}, "seed must be a whole number, a tuple"),
    ({"seed": [1]}, "seed has 1 value for 3 prompts"),
]


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        *(
            ("forward_backward", {"sequences": sequences, **settings}, words)
            for sequences, settings, words in MISTAKES.values()
        ),
        *(("sample", {"prompts": PROMPTS, **each}, words) for each, words in SAMPLING_MISTAKES),
    ],
    ids=[*MISTAKES, *(words for _, words in SAMPLING_MISTAKES)],
)
def test_a_mistake_in_sequences_or_sampling_is_one_clear_error(method, settings, words, trainer):
    with pytest.raises(ValueError, match=words):
        getattr(trainer, method)(**settings)


def test_a_mistake_leaves_no_gradient_behind(trainer):
    with pytest.raises(ValueError, match="optim_step needs a gradient"):
        trainer.optim_step(1e-3)
    trainer.forward_backward([GOOD])
    with pytest.raises(ValueError, match="learning_rate must be a number >= 0, got nan"):
        trainer.optim_step(math.nan)
    before = trainer.optim_step(0.0).grad_norm
    calls = iter(range(9))

    def fails_late(logprobs, sequence):
        if next(calls) == 3:
            raise KeyError("a mistake of the caller's")
        return -logprobs

    with pytest.raises(KeyError, match="of the caller's"):
        trainer.forward_backward([GOOD] * 5, fails_late)
    trainer.forward_backward([GOOD])
    assert trainer.optim_step(0.0).grad_norm == pytest.approx(before, rel=1e-6)


def test_unknown_options_are_type_errors(trainer):
    for make in (lambda: Trainer(lora_dmi=4), lambda: Trainer(lora_din=4)):
        with pytest.raises(TypeError, match="did you mean --lora_dim?"):
            make()
    with pytest.raises(TypeError, match="did you mean --cliprange?"):
        trainer.forward_backward([GOOD], "ppo", cliprang=0.1)
    with pytest.raises(TypeError, match=r"optim_step\(learning_rate=\.\.\.\)"):
        Trainer(learning_rate=1e-3)
    with pytest.raises(ValueError, match="--lora_dim: must be a whole number, got 'many'"):
        Trainer(lora_dim="many")
    with pytest.raises(ValueError, match="--model_name_or_path /nowhere"):
        Trainer("/nowhere/model")


def test_a_model_without_adapter_trains_every_weight(tmp_path):
    with Trainer(seed=1) as trainer:
        before = trainer.forward_backward(random_sequences(3))
        trainer.optim_step(1e-3)
        assert trainer.forward_backward(random_sequences(3)) < before
        with pytest.raises(ValueError, match="export_adapter needs an adapter, but all weights"):
            trainer.export_adapter(tmp_path / "adapter")
        trainer.optim_step(0.0)
        trainer.forward_backward(random_sequences(2), lambda p, s: p * math.inf)
        assert trainer.optim_step(1e-3).skipped
        with torch.no_grad():
            next(iter(trainer._parts.adapted.model.parameters())).fill_(math.nan)
        with pytest.raises(ValueError, match="no token can be sampled"):
            trainer.sample(PROMPTS, max_tokens=2)
