"""Trainers beside and after each other, and in several processes at every ZeRO stage."""

import gc

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from trainer_runs import PROMPTS, go_on, random_sequences, train

from dschat_lora.addons.trainer.trainer import Trainer
from dschat_lora.engine.process_group import shutdown
from helpers.spread import ALL


def test_trainers_stand_beside_each_other_and_after_each_other():
    expected = None
    for _ in range(2):
        policy, teacher = Trainer(lora_dim=4, seed=1), Trainer(lora_dim=2, seed=2)
        loss = policy.forward_backward(random_sequences(3))
        teacher.forward_backward(random_sequences(4))
        teacher.optim_step(1e-2)
        policy.optim_step(1e-2)
        found = loss, policy.forward_backward(random_sequences(3))
        teacher.close()
        teacher.close()
        assert dist.is_initialized()
        with pytest.raises(ValueError, match="the Trainer is closed"):
            teacher.logprobs(random_sequences(1))
        assert policy.forward_backward(random_sequences(3)) == found[1]
        del policy  # without close()
        gc.collect()
        assert expected in (None, found)
        expected = found


def test_a_trainer_whose_process_group_has_ended_says_so():
    trainer = Trainer(lora_dim=4, seed=1)
    expected = trainer.forward_backward(random_sequences(3))
    shutdown()  # as a run in this process does at its end
    for _ in range(2):
        with pytest.raises(ValueError, match="has destroyed the Trainer's process group"):
            trainer.forward_backward(random_sequences(3))
        # Not even where there is another one.
        other = Trainer(lora_dim=4, seed=1)
        assert other.forward_backward(random_sequences(3)) == expected
    trainer.close()
    assert other.forward_backward(random_sequences(3)) == expected
    other.close()
    assert not dist.is_initialized()


def test_a_saved_trainer_goes_on_bit_for_bit(tmp_path):
    def steps(trainer, start):
        found = []
        for step in range(start, start + 2):
            found.append(trainer.forward_backward(random_sequences(4, seed=step)))
            found.append(trainer.optim_step(1e-2).grad_norm)
        return found

    settings = {"lora_dim": 4, "lora_dropout": 0.2, "seed": 3}
    with Trainer(**settings) as trainer:
        trainer.save(tmp_path / "start")
        first = steps(trainer, 0)
        trainer.load(tmp_path / "start")
        assert steps(trainer, 0) == first
        trainer.save(tmp_path / "state")
        expected = steps(trainer, 2)
        probe = trainer.logprobs(random_sequences(2))
        trainer.load(tmp_path / "state")
        assert trainer.step == 2
        assert steps(trainer, 2) == expected
    with Trainer(**settings) as other:
        other.load(tmp_path / "state")
        assert steps(other, 2) == expected
        assert all(map(torch.equal, other.logprobs(random_sequences(2)), probe))
        trainer_state = sorted(path.name for path in (tmp_path / "state").iterdir())
        assert trainer_state == ["manifest.json", "model-00001.safetensors", "state.json"]


def test_what_cannot_be_loaded_or_saved_is_said(tmp_path):
    with Trainer(lora_dim=4, seed=3) as trainer:
        with pytest.raises(ValueError, match="contains nothing saved by a Trainer"):
            trainer.load(tmp_path)
        trainer.forward_backward(random_sequences(2))
        with pytest.raises(ValueError, match="save comes after optim_step"):
            trainer.save(tmp_path / "state")
        trainer.optim_step(1e-3)
        trainer.save(tmp_path / "state")
    with Trainer(lora_dim=2, seed=3) as other:
        with pytest.raises(ValueError, match=r"another adapter \(r 4, .*, here r 2"):
            other.load(tmp_path / "state")
        file = tmp_path / "state" / "model-00001.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"x")
        with pytest.raises(ValueError, match=r"model-00001\.safetensors"):
            other.load(tmp_path / "state")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process gives at ZeRO 0, and what it has saved."""
    directory = tmp_path_factory.mktemp("alone") / "state"
    found = train(stage=0, directory=directory)
    return found | {"saved": load_file(directory / "model-00001.safetensors")}


@pytest.mark.stage
@pytest.mark.parametrize("stage", [0, 2, 3] if ALL else [3])
def test_two_ranks_are_one_on_all_sequences(stage, alone, ranks, tmp_path):
    shared = ranks(2).run("trainer_runs:train", stage=stage, directory=str(tmp_path / "shared"))
    for each in shared:
        assert each["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert each["norms"] == pytest.approx(alone["norms"], rel=1e-4)
    for first, own in enumerate(shared):
        assert own["tokens"] == alone["tokens"][first::2]
        for found, expected in zip(own["logprobs"], alone["logprobs"][first::2], strict=True):
            assert found == pytest.approx(expected, abs=1e-4)
    saved = load_file(tmp_path / "shared" / "model-00001.safetensors")
    torch.testing.assert_close(saved, alone["saved"], atol=1e-5, rtol=1e-5)
    # What two processes have saved one goes on from, at another stage.
    settings = {"stage": 0, "directory": str(tmp_path / "shared")}
    found = ranks(2).run("trainer_runs:go_on", **(settings | {"stage": stage}))
    assert found[0] == found[1]
    here = go_on(**settings, has_past=False)
    assert here["step"] == found[0]["step"] == 5
    assert here["losses"] == pytest.approx(found[0]["losses"], rel=1e-5)


@pytest.mark.thorough
@pytest.mark.stage
def test_zero_stages_agree_in_one_process(alone):
    for settings in ({"stage": 2}, {"stage": 3}, {"stage": 2, "offload": True}):
        found = train(**settings)
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert found["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        assert found["tokens"] == alone["tokens"]


@pytest.mark.stage
def test_a_mistake_on_one_rank_is_one_on_all(ranks):
    bad = {**random_sequences(1)[0], "weights": [1.0]}
    found = ranks(2).run("trainer_runs:refused", sequences=[random_sequences(2), [bad]])
    assert found[0] == found[1]
    assert found[0]["words"].startswith("sequences[0]['weights'] has 1 value for ")
    assert found[0]["loss"] > 0


@pytest.mark.thorough
@pytest.mark.stage
def test_sharded_weights_sample_as_whole_ones_do(ranks):
    run = "trainer_runs:sample_in_shards"
    whole, shards = (ranks(2).run(run, small=small) for small in (False, True))
    assert shards == whole
    assert whole[1]["tokens"] == []
    with Trainer(lora_dim=4, seed=1) as trainer:
        alone = trainer.sample(PROMPTS, num_samples=2, max_tokens=3, seed=3)
    assert [[sample.tokens for sample in each] for each in alone] == whole[0]["tokens"]
