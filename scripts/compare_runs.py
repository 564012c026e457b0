"""Whether this tree computes what a base commit computes, digit for digit.

``python scripts/compare_runs.py BASE [--only grpo ppo] [--processes 1 2] [--keep DIR] [--list]``
checks out the commit BASE in a git worktree, has it and this tree run the same small
configurations of every stage on the CPU, and compares what they write: ``metrics.jsonl`` without
times, rollouts, adapters and checkpoints, tensors bit for bit. Then this tree resumes a copy of the
base's checkpoint of halfway, and has to end with what the base ended with. A line for each
configuration says ``equal`` or shows the first difference; the exit status is 1 where any differs
and 2 where a run failed, whose last lines are shown.

``--keep DIR`` keeps what the base wrote, by commit, so that the next comparison runs this tree
alone; several comparisons may share it at a time, and each run of the base is made once. ``--work
DIR`` keeps what this tree wrote. ``--jobs N`` runs N configurations at a time, each process with
one thread.

To see that a difference is found, change one sign, such as that of ``-advantages * ratios`` in
``dschat_lora/algos/ppo.py``, and compare ``--only ppo grpo --processes 1``: the first line of
metrics or the first tensor that the change reaches is printed.

Uncommitted changes of this tree take part. Runs of one commit are alike on one machine and by one
installation of torch alone: a base that was kept on another machine may differ in rounding.
"""

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from run_differences import LEFT_OUT, LEFT_OUT_OF_RESUMED, first_difference
from run_inputs import rollout_server, write_inputs

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 300  # that a run may take
RESUME = "--resume_from_checkpoint latest"
DONE = "done.json"  # of a kept run: names of its paths


@dataclass(frozen=True)
class Configuration:
    """A run of both trees.

    Attributes:
        stage: directory of its script under ``training/``.
        options: of the script; ``{inputs}`` stands for their path, ``{server}`` and
            ``{teacher_server}`` for addresses of servers of the actor's base and of the teacher.
        two: further options in two processes.
        processes: numbers of processes in which it runs.
        half: the step whose checkpoint is resumed.
    """

    stage: str
    options: str
    two: str = ""
    processes: tuple[int, ...] = (1, 2)
    half: int = 2

    def options_in(self, processes: int) -> str:
        """All options in so many processes."""
        return self.options + (f" {self.two}" if processes == 2 else "")


SAVES = "--max_steps 4 --save_interval 2 --save_minutes 0 --save_total_limit 0"
MODEL = "--model_name_or_path {inputs}/model --preprocessing_num_workers 1"
PAIRS = "--data_path {inputs}/train.jsonl --eval_data_path {inputs}/eval.jsonl"
SUPERVISED = (
    f"{SAVES} --lora_dim 4 --lora_learning_rate 5e-3 --per_device_train_batch_size 4 "
    "--gradient_accumulation_steps 2 --eval_interval 2 --lora_dropout 0.1"
)
RL = (
    f"{SAVES} --actor_model_name_or_path {{inputs}}/model --actor_lora_dim 4 --eval_interval 2 "
    "--actor_lora_learning_rate 5e-3 --per_device_generation_batch_size 8 --max_answer_seq_len 12 "
    "--per_device_training_batch_size 4 --gradient_accumulation_steps 2 --num_train_epochs 9 "
    "--eval_prompts 3 --sample_generations 1 --preprocessing_num_workers 1"
)
PROMPTS = "--data_path {inputs}/prompts.jsonl --eval_data_path {inputs}/eval_prompts.jsonl"
SCORED = "--reward_function user_functions:score"
GROUPS = f"{RL} --num_generations 4"
GRPO = f"{GROUPS} {PROMPTS} {SCORED} --algorithm grpo"
PPO = (
    f"{RL} {PROMPTS} --critic_model_name_or_path {{inputs}}/reward "
    "--critic_lora_learning_rate 5e-3 --critic_learning_rate 1e-3"
)
SERVER = f"{GRPO} --rollout_engine {{server}}"
SLOWLY = "--actor_lora_learning_rate 1e-3"  # the server's policy is the base's all along
# What an address stands for, and the model in the inputs that its server has.
SERVERS = {"{server}": "model", "{teacher_server}": "teacher"}
CONFIGURATIONS = {
    # The bundled model and data of either tree.
    "sft": Configuration("step1_sft", f"{SUPERVISED} --packing --eval_iters 2", "--zero_stage 3"),
    "reward": Configuration("step2_reward", f"{SUPERVISED} {MODEL} {PAIRS}", "--zero_stage 2"),
    "dpo": Configuration("step2_dpo", f"{SUPERVISED} {MODEL} {PAIRS}", "--zero_stage 1"),
    "kto": Configuration(
        "step2_dpo",
        f"{SUPERVISED} {MODEL} --loss_type kto --data_path {{inputs}}/unpaired.jsonl "
        "--no-precompute_ref_log_probs",
    ),
    "ppo": Configuration("step3_rlhf", f"{PPO} --ppo_epochs 2 --whiten_advantages"),
    "rloo": Configuration("step3_rlhf", f"{GROUPS} {PROMPTS} {SCORED} --algorithm rloo"),
    "grpo": Configuration("step3_rlhf", GRPO, "--zero_stage 3"),
    "distill": Configuration(
        "step3_rlhf",
        f"{RL} {PROMPTS} --algorithm distill --teacher_model_name_or_path {{inputs}}/teacher",
    ),
    "environment": Configuration(
        "step3_rlhf",
        f"{GRPO} --environment user_functions:reply --max_turns 3 --max_answer_seq_len 48",
    ),
    "agent": Configuration(
        "step3_rlhf",
        f"{GROUPS} --algorithm grpo --data_path {{inputs}}/chats.jsonl --eval_ratio 0.1 "
        "--agent user_functions:play",
    ),
    "server": Configuration("step3_rlhf", f"{SERVER} {SLOWLY}"),
    "ahead": Configuration("step3_rlhf", f"{SERVER} --rollouts_ahead 1 {SLOWLY}"),
    "dynamic": Configuration(
        "step3_rlhf",
        f"{GROUPS} {PROMPTS} --reward_function user_functions:by_thirds --algorithm dapo "
        "--dynamic_sampling 2 --no-mask_truncated_completions",
    ),
    "text": Configuration(
        "step3_rlhf",
        f"{PPO} --unsupervised_dataset_name {{inputs}}/texts.jsonl --unsup_coef 0.3 --enable_ema "
        "--ema_decay 0.8 --adaptive_kl_target 0.5 --kl_horizon 40 --reward_scaling running",
        "--zero_stage 2",
    ),
    "streaming": Configuration(
        "step3_rlhf",
        f"{GROUPS} {SCORED} --algorithm grpo --streaming --shuffle_buffer_size 10 "
        "--data_path {inputs}/shards --eval_data_path {inputs}/eval_prompts.jsonl",
    ),
    "rewards": Configuration(
        "step3_rlhf",
        f"{GROUPS} {PROMPTS} --algorithm grpo --reward_function user_functions:score "
        "user_functions:by_thirds --reward_weights 1 0.3 --soft_overlong_tokens 6 "
        "--missing_eos_penalty 0.2",
        processes=(2,),
    ),
    "stateful": Configuration(
        "step3_rlhf",
        f"{GROUPS} {PROMPTS} --algorithm grpo --environment user_functions:Counting "
        "--max_turns 3 --max_answer_seq_len 48",
        processes=(1,),
    ),
    "steered": Configuration(
        "step3_rlhf",
        f"{PPO} --ppo_epochs 4 --max_steps 8 --save_interval 4 --critic_warmup_iterations 1 "
        "--target_kl 0.004 --kl_budget 0.001",
        processes=(1,),
        half=4,
    ),
    "correction": Configuration(
        "step3_rlhf",
        f"{GRPO} --top_p 0.8 --rollout_correction mis --rollout_is sequence "
        "--rollout_is_threshold 1.5 --rollout_is_threshold_lower 0.3",
        processes=(1,),
    ),
    "rollout_logprobs": Configuration(
        "step3_rlhf", f"{GRPO} --use_rollout_logprobs --ppo_epochs 2", processes=(1,)
    ),
    "four_bit": Configuration("step3_rlhf", f"{GRPO} --base_bits 4", processes=(1,)),
    "tensor_parallel": Configuration(
        "step3_rlhf", f"{GRPO} --tensor_parallel_size 2", processes=(2,)
    ),
    "off_policy": Configuration(
        "step3_rlhf",
        f"{RL} {PAIRS} --algorithm distill --teacher_model_name_or_path {{inputs}}/teacher "
        "--distill_loss jsd --on_policy_share 0.5",
        processes=(2,),
    ),
    "served_teacher": Configuration(
        "step3_rlhf",
        f"{RL} {PROMPTS} --algorithm distill --distill_loss sampled_reverse_kl "
        "--teacher_model_name_or_path {teacher_server}",
        processes=(1,),
    ),
    "nlg": Configuration(
        "nlg_gpt2",
        "--init_checkpoint {inputs}/gpt2 --train_data {inputs}/train.txt --valid_data "
        "{inputs}/held.txt --lr 2e-2 --max_step 4 --label_smooth 0.1 --save_interval 2 "
        "--train_batch_size 4 --log_interval 1 --sample_generations 0",
    ),
    "glue": Configuration(
        "nlu_glue",
        "--model_name_or_path {inputs}/roberta --task_name sst2 --data_dir {inputs}/sst2 "
        "--apply_lora --learning_rate 1e-2 --max_steps 4 --logging_steps 1 --save_steps 2 "
        "--per_device_train_batch_size 4 --eval_strategy steps --eval_steps 2",
    ),
}


class RunError(Exception):
    """A run failed; the message has its last lines."""


@dataclass(frozen=True)
class Tree:
    """A checkout and the inputs of its runs."""

    path: Path
    inputs: Path

    def paths(self, home: Path) -> dict[str, str]:
        """Names of the paths that a run in ``home`` may write."""
        return {str(self.path): "TREE", str(self.inputs): "INPUTS", str(home): "HOME"}

    def start(self, command: list[str], home: Path, **more: str) -> subprocess.Popen[bytes]:
        """Start Python on a command in ``home``, where its output is appended to ``output``."""
        known = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK")}
        environment = known | {
            "PYTHONPATH": f"{self.path}{os.pathsep}{self.inputs}",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "DS_ACCELERATOR": "cpu",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            # A cache that both trees share would hide what preparing the data changed.
            "XDG_CACHE_HOME": str(home / "cache"),
            **more,
        }
        with (home / "output").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, *command],
                cwd=home,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def check(self, home: Path) -> None:
        """Assert that runs import the package of this checkout."""
        home.mkdir(parents=True, exist_ok=True)
        process = self.start(["-c", "import dschat_lora; print(dschat_lora.__file__)"], home)
        process.wait()
        found = (home / "output").read_text().strip()
        assert found == str(self.path / "dschat_lora" / "__init__.py"), found

    def run(self, stage: str, options: str, home: Path, processes: int = 1) -> Path:
        """Run a stage in so many processes; its output directory, ``home/out``.

        Raises:
            RunError: if it fails or takes too long.
        """
        home.mkdir(parents=True, exist_ok=True)
        script = str(self.path / "training" / stage / "main.py")
        with ExitStack() as stack:
            for place, served in SERVERS.items():
                if place in options:
                    address = stack.enter_context(rollout_server(self.inputs / served))
                    options = options.replace(place, address)
            options = options.replace("{inputs}", str(self.inputs))
            command = [script, *options.split(), "--output_dir", "out"]
            ranks = _ranks(processes) if processes > 1 else [{}]
            started = [self.start(command, home, **rank) for rank in ranks]
            codes: list[int | str] = ["too long"]
            try:
                with suppress(subprocess.TimeoutExpired):
                    codes = [process.wait(SECONDS) for process in started]
            finally:
                for process in started:
                    process.kill()
        shutil.rmtree(home / "cache", ignore_errors=True)
        if any(code != 0 for code in codes):
            said = (home / "output").read_text(errors="replace")[-3000:]
            raise RunError(f"exit status {codes}, {' '.join(command)}\n{said}")
        return home / "out"


def _ranks(count: int) -> list[dict[str, str]]:
    """What tells processes of one machine of each other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    sizes = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    return [
        {**common, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)
    ]


@contextmanager
def _worktree(commit: str) -> Iterator[Path]:
    """A checkout of a commit that ends with the block."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory).resolve() / "base"
        _git("worktree", "add", "--detach", str(path), commit)
        try:
            yield path
        finally:
            _git("worktree", "remove", "--force", str(path))


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


def _normaliser(names: dict[str, str]) -> Callable[[str], str]:
    """Replaces paths by names, and addresses of servers."""

    def change(text: str) -> str:
        for path in sorted(names, key=len, reverse=True):
            text = text.replace(path, names[path])
        return re.sub(r"http://127\.0\.0\.1:\d+", "SERVER", text)

    return change


def _copy_halfway(whole: Path, copy: Path, half: int) -> None:
    """Copy of a finished run what it had when it wrote its checkpoint of the step ``half``."""

    def later(directory: str, names: list[str]) -> set[str]:
        left = {"adapter", "model", "actor", "critic", "actor_ema", "report.html"} & set(names)
        for name in names:
            step = re.fullmatch(r"(?:step|checkpoint)-(\d+)(?:\.\w+)?", name)
            if step and int(step[1]) > half:
                left.add(name)
        return left

    copy.parent.mkdir(parents=True)
    shutil.copytree(whole, copy, ignore=later, symlinks=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait until no other process or thread is in such a block of this path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def kept_run(base: Tree, kept: Path, name: str, processes: int) -> Path:
    """The directory below ``kept`` of the base's run, which is made if it is not there.

    Raises:
        RunError: if the run fails.
    """
    configuration = CONFIGURATIONS[name]
    options = configuration.options_in(processes)
    # Trees whose configurations of a name differ may share what is kept.
    home = kept / f"{name}-{processes}-{_digest(options.encode())}"
    with _locked(home):
        if not (home / DONE).exists():
            shutil.rmtree(home, ignore_errors=True)
            base.run(configuration.stage, options, home, processes)
            (home / DONE).write_text(json.dumps(base.paths(home)))
    return home


def _digest(data: bytes) -> str:
    return sha256(data).hexdigest()[:8]


def _code_of_data(tree: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (tree / "dschat_lora/data").rglob("*.py")}


def compare(
    base: Tree, tree: Tree, kept: Path, work: Path, left_out: str, name: str, processes: int
) -> str:
    """How this tree's run differs from the base's, and one that resumes the base's; ``""``: not.

    ``left_out`` are fields that are not compared, as a pattern that begins with ``|``.

    Raises:
        RunError: if a run fails.
    """
    configuration = CONFIGURATIONS[name]
    options = configuration.options_in(processes)
    home = kept_run(base, kept, name, processes)
    mine = work / f"{name}-{processes}"
    shutil.rmtree(mine, ignore_errors=True)
    paths = json.loads((home / DONE).read_text())
    runs = {"": mine, "resumed from the base's checkpoint: ": mine / "resumed"}
    for title, place in runs.items():
        if title:
            _copy_halfway(home / "out", place / "out", configuration.half)
        tree.run(configuration.stage, f"{options} {RESUME if title else ''}", place, processes)
        if difference := first_difference(
            home / "out",
            place / "out",
            normalise=(_normaliser(paths), _normaliser(paths | tree.paths(place))),
            left_out=re.compile((LEFT_OUT_OF_RESUMED if title else LEFT_OUT).pattern + left_out),
        ):
            return title + difference
    return ""


def main() -> int:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("base", nargs="?", metavar="BASE", help="commit to compare with")
    parser.add_argument("--only", nargs="+", choices=CONFIGURATIONS, default=[*CONFIGURATIONS])
    parser.add_argument("--processes", nargs="+", type=int, choices=(1, 2), default=[1, 2])
    parser.add_argument("--keep", type=Path, help="directory that keeps what the base wrote")
    parser.add_argument("--work", type=Path, help="directory that keeps what this tree wrote")
    parser.add_argument("--jobs", type=int, default=1, help="configurations at a time")
    parser.add_argument("--list", action="store_true", help="list configurations, run nothing")
    options = parser.parse_args()
    chosen = [
        (name, number)
        for name in options.only
        for number in options.processes
        if number in CONFIGURATIONS[name].processes
    ]
    if not chosen:
        parser.error(f"{' '.join(options.only)}: in another number of processes alone")
    if options.list or options.base is None:
        print("\n".join(f"{name} in {number}" for name, number in chosen))
        return 0 if options.list else parser.error("which commit is the base?")
    return _compare_all(options.base, chosen, options.keep, options.work, options.jobs)


def _compare_all(
    commit: str, chosen: list[tuple[str, int]], keep: Path | None, work: Path | None, jobs: int
) -> int:
    commit = _git("rev-parse", f"{commit}^{{commit}}")
    digest = _digest(Path(__file__).with_name("run_inputs.py").read_bytes())
    worst = 0
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory())).resolve()
        kept = (keep or temporary).resolve() / f"{commit[:12]}-{digest}"
        work = (work or temporary / "work").resolve()
        inputs = kept / "inputs"
        base = Tree(stack.enter_context(_worktree(commit)), inputs)
        tree = Tree(ROOT, inputs)
        for each, name in ((base, "base"), (tree, "tree")):
            each.check(temporary / f"check-{name}")
        with _locked(inputs):
            if not (kept / "inputs.done").exists():
                shutil.rmtree(inputs, ignore_errors=True)
                write_inputs(
                    inputs,
                    base.path,
                    lambda stage, options: base.run(stage, options, temporary / stage),
                )
                (kept / "inputs.done").touch()
        left_out = ""
        if _code_of_data(base.path) != _code_of_data(ROOT):
            print("the code of data/ is another: fingerprints of data are not compared", flush=True)
            left_out = "|fingerprint"
        pool = ThreadPoolExecutor(jobs)
        stack.callback(pool.shutdown, cancel_futures=True)
        futures = [pool.submit(compare, base, tree, kept, work, left_out, *each) for each in chosen]
        for (name, processes), future in zip(chosen, futures, strict=True):
            title = f"{name} in {processes} process{'es' if processes > 1 else ''}: "
            try:
                difference = future.result()
                worst = max(worst, 1 if difference else 0)
            except RunError as error:
                difference, worst = f"failed: {error}", 2
            print(title + (difference or "equal"), flush=True)
    return worst


if __name__ == "__main__":
    # The checkout of the base goes too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with suppress(KeyboardInterrupt):
        sys.exit(main())
