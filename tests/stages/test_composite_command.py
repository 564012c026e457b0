"""Every command on a composite checkpoint: training, its end and what is made of it."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from dschat_lora.assets import BUNDLED_DATA
from helpers.composites import COMPOSITES, save_composite, whole_model
from helpers.launcher import ROOT
from helpers.spread import ALL

pytestmark = pytest.mark.stage
KINDS = COMPOSITES if ALL else ("gemma3",)
MAIN = ROOT / "dschat_lora" / "__main__.py"
SHORT = """
    --lora_dim 4 --lora_learning_rate 5e-3 --max_seq_len 64 --eval_iters 1 --sample_generations 0
    --per_device_train_batch_size 2
""".split()
RUN = [*SHORT, "--data_path", str(BUNDLED_DATA["eval"]), "--max_steps", "2"]
ROLLOUTS = """
    --max_steps 1 --max_prompt_seq_len 64 --max_answer_seq_len 8 --eval_iters 1
    --per_device_generation_batch_size 2 --per_device_training_batch_size 2
""".split()


@pytest.fixture(scope="module", params=KINDS)
def run(request, launcher, tmp_path_factory):
    """``run(*argv)``: what a command wrote that ended well; its first has trained."""
    home = tmp_path_factory.mktemp(request.param)
    save_composite(request.param, home / "base")

    def call(*argv, ranks=1):
        running = launcher.start(argv, home, ranks=ranks, script=MAIN)
        codes = running.wait()
        assert codes == [0] * ranks, running.err()
        return running.out()

    said = call("sft", "--model_name_or_path", "base", *RUN, "--save_interval", "1")
    shutil.move(home / "output/sft", home / "sft")
    return SimpleNamespace(call=call, home=home, said=said, kind=request.param)


def trained(directory):
    tensors = load_file(directory / "adapter" / "adapter_model.safetensors")
    assert all(t.abs().max() > 0 for name, t in tensors.items() if "layers.0.self_attn" in name)
    return tensors


def test_the_run_says_what_of_the_model_trains_and_what_is_left_out(run):
    line = next(each for each in run.said.splitlines() if "  composite  " in each)
    assert f"the text model of {run.kind}" in line
    assert "not loaded" in line


def test_a_run_that_is_resumed_ends_as_one_that_was_not(run):
    shutil.copytree(run.home / "sft", run.home / "again")
    shutil.rmtree(run.home / "again" / "adapter")
    shutil.rmtree(max((run.home / "again" / "checkpoints").iterdir()))
    run.call("sft", "--output_dir", "again", "--resume_from_checkpoint", "auto")
    whole, again = (trained(run.home / name) for name in ("sft", "again"))
    assert whole.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())


@pytest.mark.thorough
def test_a_checkpoint_an_adapter_and_its_merge_answer_alike(run):
    said = run.call("merge", "sft", "--output_dir", "merged", "--dtype", "fp32")
    assert f"it is a {run.kind} model: " in said
    assert whole_model(run.home / "merged").config.model_type == run.kind
    newest = max((run.home / "sft" / "checkpoints").iterdir())
    said = {
        run.call("generate", name, "Hello", "--max_new_tokens", "8", "--dtype", "fp32")
        for name in ("sft", newest.relative_to(run.home), "merged")
    }
    assert len(said) == 1


@pytest.mark.thorough
def test_processes_that_share_the_weights_train_the_same_layers(run):
    argv = ["sft", "--model_name_or_path", "base", *RUN, "--zero_stage", "3"]
    run.call(*argv, "--output_dir", "shared", ranks=2)
    assert trained(run.home / "shared").keys() == trained(run.home / "sft").keys()


@pytest.mark.thorough
def test_preferences_rewards_and_rollouts_train_it(run):
    run.call("dpo", "--model_name_or_path", "sft", *RUN, "--output_dir", "dpo")
    run.call("reward", "--model_name_or_path", "base", *RUN, "--output_dir", "reward")
    roles = ["--actor_model_name_or_path", "sft", "--critic_model_name_or_path", "reward"]
    prompts = ["--data_path", str(BUNDLED_DATA["eval"]), *roles, *ROLLOUTS]
    run.call("rlhf", *prompts, "--output_dir", "ppo")
    group = ["--algorithm", "grpo", "--num_generations", "2"]
    run.call("rlhf", *prompts, *group, "--output_dir", "grpo")
    for name in ("dpo", "reward", "ppo/actor", "ppo/critic", "grpo/actor"):
        trained(run.home / name)
