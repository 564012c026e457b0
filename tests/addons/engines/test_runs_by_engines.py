"""Whole runs of step 3 whose responses other engines draw, and what is left when servers go."""

import json
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

import dschat_lora as dl
from addons.engines.fake_vllm import command_of
from dschat_lora.addons.engines import completion_pool
from dschat_lora.assets import BUNDLED_MODEL
from helpers.served import served
from helpers.spread import ALL
from helpers.step1 import rollouts

pytestmark = pytest.mark.stage

ROWS = [{"prompt": f"\n\nHuman: What is {a} plus 3?\n\nAssistant:"} for a in range(40)]
OPTIONS = {
    "algorithm": "grpo",
    "num_generations": 4,
    "actor_lora_dim": 4,
    "per_device_generation_batch_size": 16,
    "per_device_training_batch_size": 16,
    "max_answer_seq_len": 16,
    "eval_prompts": 8,
    "print_answers_interval": 0,
    "quiet": True,
}


def brevity(responses):
    return [-float(len(text)) for text in responses]


def server():
    return served("base", allow_runtime_lora_updating=True)


def of_kind(run, kind):
    return [line for line in run.metrics if line["kind"] == kind]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    home = tmp_path_factory.mktemp("runs") / "own"
    return dl.rlhf(data=ROWS, rewards=brevity, max_steps=2, output_dir=home, **OPTIONS)


def drawn(home):
    """Responses by iteration, and by what they were drawn."""
    rows = {}
    for row in rollouts(Path(home)):
        rows.setdefault(row["iteration"], []).append((row["response"], row["policy_version"]))
    return rows


def check_beside_own(run, own):
    """The same model answers, and what it drew is what is trained on."""
    first, expected = of_kind(run, "eval")[0], of_kind(own, "eval")[0]
    assert first["greedy_reward"] == pytest.approx(expected["greedy_reward"], abs=1e-4)
    check_drawn(run)


def check_drawn(run):
    """What the engine drew is of the policy that is trained."""
    assert run.status == "finished"
    for line in of_kind(run, "train"):
        assert line["sampler_error_max"] < 1e-4
        assert abs(line["rollout_kl"]) < 1e-8
        assert line["importance_weight"] == pytest.approx(1, abs=1e-5)
    assert (Path(run.path) / "actor" / "adapter" / "adapter_config.json").is_file()


def test_vllm_is_started_for_a_run_and_ends_with_it(tmp_path):
    with server() as address:
        run = dl.rlhf(
            data=ROWS,
            rewards=brevity,
            max_steps=2,
            output_dir=tmp_path / "run",
            rollout_engine="vllm",
            vllm_command=command_of(address),
            **OPTIONS | {"eval_prompts": 0},
        )
    check_drawn(run)
    told = json.loads((tmp_path / "run/vllm/0.log").read_text().splitlines()[0])
    assert told["words"][:2] == ["serve", str(BUNDLED_MODEL.resolve())]
    assert not psutil.pid_exists(told["pids"][0])


def test_vllm_that_does_not_start_ends_a_run_with_what_it_said(tmp_path):
    with pytest.raises(OSError, match=r"^--rollout_engine vllm: it ended .*says: .*no such model"):
        dl.rlhf(
            data=ROWS,
            rewards=brevity,
            output_dir=tmp_path / "run",
            rollout_engine="vllm",
            vllm_command=command_of("broken"),
            **OPTIONS,
        )


@pytest.mark.thorough
@pytest.mark.parametrize("ahead", [0, 1] if ALL else [1])
def test_a_run_ends_with_a_checkpoint_when_the_last_server_goes_and_another_goes_on(
    own, tmp_path, monkeypatch, ahead
):
    monkeypatch.setattr(completion_pool, "PATIENCE", 0.0)
    home, shared = tmp_path / "run", tmp_path / "shared"
    with ExitStack() as servers:
        address = servers.enter_context(server())

        def stop_server(event, step, metrics):
            if (event, step) == ("train", 2):
                servers.close()

        with pytest.raises(OSError, match=f"no server is left .*{address}"):
            dl.rlhf(
                data=ROWS,
                rewards=brevity,
                max_steps=4,
                output_dir=home,
                callbacks=[stop_server],
                rollout_engine=f"{address}/v1",
                rollout_adapter_dir=str(shared),
                rollouts_ahead=ahead,
                **OPTIONS,
            )
    assert list(shared.iterdir()) == []
    assert json.loads((home / "run.json").read_text())["status"] != "finished"
    with server() as other:
        run = dl.rlhf(
            data=ROWS,
            rewards=brevity,
            output_dir=home,
            resume="latest",
            rollout_engine=other,
            quiet=True,
        )
    if ahead:
        versions = [{version for _, version in drawn(home)[n]} for n in (1, 2, 3, 4)]
        # What was whole is in the checkpoint, what was not is drawn by the adapter of then.
        assert versions in ([{0}, {0}, {1}, {2}], [{0}, {0}, {2}, {2}])
    else:
        check_beside_own(run, own)
    assert [line["step"] for line in of_kind(run, "train")] == [1, 2, 3, 4]


SMALL = {  # enough for texts that differ where the policy does
    **OPTIONS,
    "rollouts_ahead": 1,
    "actor_lora_learning_rate": 5e-3,
    "eval_prompts": 0,
    "per_device_generation_batch_size": 8,
    "per_device_training_batch_size": 8,
    "max_answer_seq_len": 8,
    # No draw of it is within 1e-4 of another token; of 1234 one is within 4e-8, where the rounding
    # of products, which depends on what else a batch holds, decides.
    "seed": 6,
}


def test_the_next_iteration_is_drawn_while_one_trains_and_resumed_runs_learn_from_the_same(
    tmp_path,
):
    def stop(event, step, metrics):
        return "stop" if (event, step) == ("train", 2) else None

    with server() as address:
        options = {"data": ROWS, "rewards": brevity, "rollout_engine": address, **SMALL}
        whole = dl.rlhf(max_steps=4, output_dir=tmp_path / "whole", **options)
        home = tmp_path / "stopped"
        dl.rlhf(max_steps=4, output_dir=home, callbacks=[stop], **options)
        assert len(drawn(home)) == 2
        dl.rlhf(data=ROWS, rewards=brevity, output_dir=home, resume="latest", quiet=True)
    lags = [line["rollout_version_lag"] for line in of_kind(whole, "train")]
    assert lags == [0, 1, 1, 1]
    rows = drawn(whole.path)
    assert [{version for _, version in rows[n]} for n in sorted(rows)] == [{0}, {0}, {1}, {2}]
    assert drawn(home) == rows
    # What an adapter that learnt nothing draws with the same seeds, by our own decoder.
    still = {**SMALL, "rollouts_ahead": 0, "actor_lora_learning_rate": 1e-12}
    untrained = dl.rlhf(
        data=ROWS, rewards=brevity, max_steps=3, output_dir=tmp_path / "own", **still
    )
    texts = {}
    for row in rollouts(Path(untrained.path)):
        texts.setdefault(row["iteration"], []).append(row["response"])
    same = [[text for text, _ in rows[n]] == texts[n] for n in (1, 2, 3)]
    assert same == [True, True, False]
    # Weights mend what the older adapter bends.
    line = of_kind(whole, "train")[-1]
    assert line["rollout_kl"] > 1e-6
    assert line["importance_weight"] != 1
