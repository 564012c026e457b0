"""Results of an iteration's steps that are read at its end, as on a GPU: the same numbers."""

import pytest

import dschat_lora as dl
from api.programs import ROLLOUTS, ROWS, brevity, numbers
from dschat_lora.rl.learn.update import Updater
from dschat_lora.rl.loop import trainer

pytestmark = pytest.mark.stage
PPO = {"algorithm": "ppo", "num_generations": 1, "ppo_epochs": 2, "max_steps": 8}


@pytest.fixture
def turns(monkeypatch):
    """What is queued and read in turn, where results are read late."""
    events, queue_steps = [], Updater.queue_steps

    def noting(self, *args, **options):
        for read in queue_steps(self, *args, **options):
            events.append("queue")
            yield lambda read=read: events.append("read") or read()

    monkeypatch.setattr(Updater, "queue_steps", noting)
    monkeypatch.setattr(trainer, "reads_late", lambda device: True)
    return events


def run(**options):
    training = {"eval_prompts": 0, "rewards": [brevity], "actor_lora_dim": 4, "save_minutes": 0}
    return dl.rlhf(data=ROWS, **{**ROLLOUTS, **training, **options})


def test_an_iteration_read_at_its_end_has_the_same_metrics(request):
    options = {**PPO, "per_device_training_batch_size": 4, "adaptive_kl_target": 0.1}
    in_time = numbers(run(**options))
    turns = request.getfixturevalue("turns")
    assert numbers(run(**options)) == in_time
    assert turns == (["queue"] * 4 + ["read"] * 4) * 2


@pytest.mark.thorough
@pytest.mark.parametrize("option", [{"target_kl": 1e9}, {"enable_ema": True}])
def test_what_decides_of_the_next_step_or_sees_the_weights_is_read_in_time(turns, option):
    run(**PPO, per_device_training_batch_size=4, **option)
    assert turns == ["queue", "read"] * 8
