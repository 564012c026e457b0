"""Distillation: what a teacher reads and says, what weights it takes, and what is refused."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

import dschat_lora as dl
from api.programs import ROWS, brevity, numbers
from dschat_lora.addons.distill import teacher as teacher_module
from dschat_lora.addons.distill.config import TeacherConfig
from dschat_lora.addons.distill.teacher import TeacherPrompts, TeacherScorer, answer_of
from dschat_lora.assets import BUNDLED_MODEL
from dschat_lora.config.groups import LoraConfig
from dschat_lora.data.chat import make_chat
from dschat_lora.data.encoder import make_encoder
from dschat_lora.data.rows import DEFAULT_OPTIONS, RowOptions
from dschat_lora.data.samples import SequenceSample
from dschat_lora.lora.rates import ruled_rates
from dschat_lora.rl.learn.engines import Engines
from dschat_lora.rl.learn.experience import Experience, advantages_and_returns
from dschat_lora.rl.options.algorithms import PpoConfig
from dschat_lora.rl.response.batch import collate
from dschat_lora.rl.response.response import Response

SHORT = {
    "max_steps": 4,
    "per_device_generation_batch_size": 4,
    "per_device_training_batch_size": 4,
    "max_prompt_seq_len": 24,
    "max_answer_seq_len": 6,
    "eval_prompts": 2,
    "actor_lora_learning_rate": 3e-3,
    "quiet": True,
}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BUNDLED_MODEL)


@pytest.fixture(scope="module")
def sft():
    options = {"max_seq_len": 64, "lora_dim": 4, "quiet": True}
    return dl.sft(data=ROWS, max_steps=2, **options), dl.sft(data=ROWS, max_steps=8, **options)


def prompts_of(tokenizer, system, most=1000):
    return TeacherPrompts(system, make_chat(tokenizer), make_encoder(tokenizer), tokenizer, most)


# ------------------------------------------------------------------------------ without a run


def test_a_system_message_is_rendered_with_messages_and_stands_before_text(tokenizer):
    encode = make_encoder(tokenizer).encode
    columns = b'{"prompt": [{"role": "user", "content": "Hi"}]}'
    own = tuple(encode(["\n\nHuman: Hi\n\nAssistant:"])[0])
    answered = [
        Response(own, (5, 6), True, 0, columns),
        Response(own, (7,), True, 0, columns),
        Response(tuple(encode(["Hi"])[0]), (5,), True, 1, b'{"prompt": "Hi"}'),
    ]
    responses = prompts_of(tokenizer, "Be brief. ")(answered)
    assert [each.prompt for each in responses] == [each.prompt for each in answered]
    read = [tokenizer.decode(each.reference_prompt) for each in responses]
    rendered = make_chat(tokenizer).render(
        [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "Hi"}],
        add_generation_prompt=True,
    )
    assert "Be brief." in rendered
    expected = [tokenizer.decode(ids) for ids in encode([rendered, rendered, "Be brief. Hi"])]
    assert read == expected


def test_a_system_message_heads_a_row_of_any_layout_and_joins_its_own(tokenizer):
    def read(row, options=DEFAULT_OPTIONS):
        asked = replace(prompts_of(tokenizer, "Be brief."), options=options)
        (response,) = asked([Response((5,), (6,), True, 0, json.dumps(row).encode())])
        return tokenizer.decode(response.reference_prompt)

    def rendered(system, text="Hi"):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        return make_chat(tokenizer).render(messages, add_generation_prompt=True)

    alone, joined = rendered("Be brief."), rendered("Be brief.\n\nBe kind.")
    alpaca = {"instruction": "Hi", "output": "Yes."}
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes."}]
    hi, kind = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be kind."}
    yes, no = ({"role": "assistant", "content": text} for text in ("Yes.", "No."))
    assert read(alpaca) == alone
    assert read({**alpaca, "input": "There"}) == rendered("Be brief.", "Hi\nThere")
    assert read({**alpaca, "system": "Be kind."}) == joined
    assert read({"conversations": turns}) == alone
    assert read({"conversations": turns, "system": "Be kind."}) == joined
    assert read({"messages": [kind, hi, yes]}) == joined
    assert read({"prompt": [kind, hi]}) == joined
    assert read({"chosen": [kind, hi, yes], "rejected": [kind, hi, no]}) == joined
    assert read({"asked": [hi]}, RowOptions({"prompt": "asked"})) == alone
    assert read({"prompt": "Hi", "completion": "Yes."}) == "Be brief.Hi"


def test_a_system_message_too_long_for_the_teacher_is_refused(tokenizer):
    answered = [Response((5, 6), (7,), True, 0, b'{"prompt": "Hi"}')]
    with pytest.raises(ValueError, match="--teacher_system_prompt with a prompt and its answer ta"):
        prompts_of(tokenizer, "word " * 30, most=20)(answered)


def test_tables_of_the_reference_are_those_of_the_same_tokens():
    """The teacher reads longer rows, and its figures stand where the actor's do."""
    answered = [
        Response((3, 4), (5, 6, 7), True, 0, reference_prompt=(9, 9, 3, 4)),
        Response((8,), (9,), True, 1, reference_prompt=(9, 9, 8)),
        Response((3, 4), (6,), True, 0, reference_prompt=(9, 9, 3, 4)),
    ]
    for shares in (False, True):
        own = collate(answered, [1, 0, 2], pad_id=0, shares_prompts=shares)
        read = own.reference or own
        assert torch.equal(own.target_ids, read.target_ids)
        assert torch.equal(own.owner, read.owner)
        assert torch.equal(own.step, read.step)
        assert read.input_ids.shape[1] == own.input_ids.shape[1] + 2
        before = [each.input_ids.flatten()[each.logit_positions] for each in (own, read)]
        assert torch.equal(*before)
    assert collate([Response((3,), (5,), True, 0)], [0], pad_id=0).reference is None


def test_the_reference_alone_reads_the_teachers_prompt():
    read = {}

    def network(role, input_ids, *rest):
        read[role] = input_ids.tolist()
        return torch.zeros(2), torch.zeros(2)

    answered = [Response((3,), (5, 6), True, 0, reference_prompt=(9, 9, 3))]
    batch = collate(answered, [0], pad_id=0)
    engines = Engines(network, None, None, 1.0)
    for role in ("actor", "reference"):
        engines.policy(batch, 2, role)
    assert read == {"actor": [[3, 5, 6]], "reference": [[9, 9, 3, 5, 6]]}


@pytest.mark.smoke
def test_an_answer_of_the_data_is_learnt_from_where_it_is_supervised():
    ignored = -100
    ids, labels = [4, 5, 6, 7, 8, 9], [ignored, ignored, 6, ignored, 8, ignored]
    sample = SequenceSample.of(torch.tensor(ids).numpy(), torch.tensor(labels).numpy())
    answer = answer_of(sample)
    assert (answer.prompt, answer.tokens) == ((4, 5), (6, 7, 8))
    assert answer.actor_mask == (True, False, True)
    assert not answer.origin.is_drawn
    whole = SequenceSample.of(torch.tensor(ids).numpy(), torch.tensor([ignored, *ids[1:]]).numpy())
    assert answer_of(whole).tokens == (5, 6, 7, 8, 9)
    assert answer_of(whole).actor_mask == ()


@pytest.mark.smoke
def test_the_advantage_of_a_drawn_token_is_the_log_ratio_of_teacher_to_student():
    mask = torch.tensor([[True, True], [True, False]])
    student = torch.tensor([[-1.0, -2.0], [-0.5, 7.0]])
    teacher = torch.tensor([[-0.25, -4.0], [-0.5, 9.0]])
    experience = Experience(
        [SimpleNamespace(group=0), SimpleNamespace(group=1)],
        mask,
        ref_logprobs=teacher,
        scores=torch.tensor([5.0, -5.0]),  # of which nothing is learnt
        scores_once_known=TeacherScorer()([], None).once_known,
        logprobs=student,
        values=None,
    )
    config = PpoConfig(algorithm="distill")
    targets = advantages_and_returns(experience, experience.scores, config, kl_coef=0.3)
    assert targets.advantages.tolist() == [[0.75, -2.0], [0.0, 0.0]]
    assert experience.scored().scores.tolist() == [-1.25, 0.0]


def test_the_rate_by_rule_is_that_of_the_published_recipe():
    stage, factor = TeacherConfig.rates
    lora = LoraConfig(lora_dim=128)
    rates = ruled_rates("qwen3", 4096, stage=stage, factor=factor, lora=lora)
    assert (rates.base, rates.adapter) == pytest.approx((1e-5, 1e-4), rel=0.02)
    assert "x 0.21 for distill" in rates.reason


# ------------------------------------------------------------------------------ runs


def stop_at(last):
    return lambda event, step, metrics: "stop" if step == last else None


@pytest.mark.stage
def test_a_student_comes_near_its_teacher_and_shares_its_base(sft, built, tmp_path):
    student, teacher = sft
    options = {**SHORT, "max_steps": 12, "per_device_generation_batch_size": 8}
    options |= {"per_device_training_batch_size": 8, "rewards": [brevity]}
    run = dl.distill(student, ROWS, teacher=teacher, output_dir=tmp_path / "out", **options)
    roles = built[0].models.roles
    owned = [
        {p.data_ptr() for n, p in each.model.named_parameters() if "lora_" not in n}
        for each in (roles.actor, roles.reference)
    ]
    assert owned[0] == owned[1]
    losses = [line["loss"] for line in run.metrics if line["kind"] == "train"]
    assert min(losses) >= 0
    assert max(losses[-3:]) < 0.5 * losses[0]
    assert run.record["stage"] == "distill"
    evals = [line["reward"] for line in run.metrics if line["kind"] == "eval"]
    assert evals[0] == pytest.approx(run.summary["first"]["reward/brevity"])
    # By the general command the run is the same.
    options |= {"algorithm": "distill", "teacher_model_name_or_path": str(teacher.path)}
    general = dl.rlhf(student, ROWS, **options, callbacks=[stop_at(2)])
    assert general.status == "stopped"
    assert numbers(general) == numbers(run)[: len(general.metrics)]


@pytest.mark.stage
@pytest.mark.parametrize(
    "options",
    [
        {"on_policy_share": 0.5, "distill_loss": "forward_kl", "distill_top_k": 4},
        pytest.param({"teacher_system_prompt": "Be kind."}, marks=pytest.mark.thorough),
    ],
    ids=["answers of the data", "a system message"],
)
def test_a_run_that_stopped_goes_on_bit_for_bit(sft, tmp_path, monkeypatch, options):
    student, teacher = sft
    heads, make = [], teacher_module.DivergenceHead
    monkeypatch.setattr(
        teacher_module, "DivergenceHead", lambda *a, **k: heads.append(make(*a, **k)) or heads[-1]
    )
    common = {**SHORT, **options, "teacher": teacher}
    whole = dl.distill(student, ROWS, **common)
    stop = [stop_at(2)]
    part = dl.distill(student, ROWS, callbacks=stop, output_dir=tmp_path / "out", **common)
    assert part.status == "stopped"
    rest = dl.distill(student, ROWS, output_dir=tmp_path / "out", resume="latest", **common)
    assert numbers(rest) == numbers(whole)
    assert {head.top_k for head in heads} == {options.get("distill_top_k", 0)}
    name = "actor/adapter/adapter_model.safetensors"
    assert (rest.path / name).read_bytes() == (whole.path / name).read_bytes()
    # Minus the divergence is the reward that is told of where nothing else scores.
    trains = [line for line in whole.metrics if line["kind"] == "train"]
    assert all(line["reward"] == pytest.approx(-line["kl"]) for line in trains)


@pytest.mark.stage
def test_a_teacher_of_four_bits_has_a_base_of_its_own(sft, built):
    student, teacher = sft
    dl.distill(student, ROWS, teacher=teacher, teacher_bits=4, **{**SHORT, "max_steps": 1})
    roles = built[0].models.roles
    assert (roles.reference.base_bits, roles.actor.base_bits) == (4, 16)
