"""Tasks of lm-evaluation-harness: the measures of its own transformers backend on PEFT's model."""

import json
from types import SimpleNamespace

import pytest
import torch

import dschat_lora as dl
from api.programs import ROWS
from dschat_lora.addons.evaluation.config import EvalConfig
from dschat_lora.addons.evaluation.measure import show_measures
from dschat_lora.assets import BUNDLED_DATA, BUNDLED_MODEL
from helpers.step1 import metrics, write_jsonl

HEAD = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
"""
BODIES = {
    "choice": """output_type: multiple_choice
doc_to_text: prompt
doc_to_choice: "{{[chosen, rejected]}}"
doc_to_target: 0
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "answers": """output_type: generate_until
doc_to_text: prompt
doc_to_target: word
generation_kwargs: {until: [",", " number"], max_gen_toks: 8}
metric_list: [{metric: exact_match}]
""",
    "rolling": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{prompt}}{{chosen}}"
metric_list: [{metric: bits_per_byte}]
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A directory of three tasks on rows of the bundled data."""
    home = tmp_path_factory.mktemp("tasks")
    with BUNDLED_DATA["eval"].open(encoding="utf-8") as file:
        rows = [json.loads(next(file)) for _ in range(24)]
    rows = [{**row, "word": row["chosen"].split(",")[0].split(" number")[0]} for row in rows]
    path = write_jsonl(home / "rows.jsonl", rows)
    for name, body in BODIES.items():
        (home / f"{name}.yaml").write_text(HEAD.format(name=f"toy_{name}", rows=path) + body)
    return home


SFT = {
    **{"lora_dim": 4, "lora_learning_rate": 1e-2, "max_steps": 8, "max_seq_len": 64},
    **{"eval_iters": 1, "eval_interval": 4, "sample_generations": 0, "quiet": True},
}


@pytest.fixture(scope="module")
def run(tasks, tmp_path_factory):
    """A run that measures the tasks before, in the middle and at the end."""
    pytest.importorskip("lm_eval", reason="needs dschat_lora[evaluation]")
    home = tmp_path_factory.mktemp("run") / "out"
    return dl.sft(eval_tasks=[str(tasks)], save_interval=4, output_dir=home, **SFT)


@pytest.mark.stage
def test_measures_are_those_of_the_transformers_backend(run, tasks, tmp_path, capsys):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    own = dl.evaluate(run, None, tasks=[str(tasks)])
    backend = HFLM(str(BUNDLED_MODEL), peft=str(run.adapter), dtype="float32", device="cpu")
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    names = [f"toy_{name}" for name in BODIES]
    found = simple_evaluate(backend, tasks=names, task_manager=manager, log_samples=False)
    for task, metric in (
        *(("toy_choice", "acc"), ("toy_choice", "acc_norm"), ("toy_answers", "exact_match")),
        ("toy_rolling", "bits_per_byte"),
    ):
        expected = found["results"][task][f"{metric},none"]
        assert own[f"{task} {metric}"] == pytest.approx(expected, rel=1e-6)
        assert metric == "bits_per_byte" or 0 < expected < 1  # else it would show nothing
    few = dl.evaluate(run, None, tasks=[str(tasks)], limit=2, num_fewshot=0)
    assert few["toy_choice acc"] in (0, 0.5, 1)
    show_measures({"toy_choice acc_norm_stderr": 0.25, "too_long": 1}, as_json=False)
    assert capsys.readouterr().out.endswith(
        "toy_choice acc_norm_stderr  0.25\ntoo long                    1\n"
    )
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"^--tasks \S*empty contains no task"):
        dl.evaluate(run, None, tasks=[str(tmp_path / "empty")])


def tasks_of(line):
    """The measures of tasks of an eval line, by the names that the verb gives them."""
    return {
        name.removeprefix("task/").replace("/", " ").replace("_standard_error", "_stderr"): value
        for name, value in line.items()
        if name.startswith("task/")
    }


@pytest.mark.stage
def test_tasks_are_measured_in_training_as_of_its_checkpoints(run, tasks):
    lines = {line["step"]: line for line in run.metrics if line["kind"] == "eval"}
    assert [*lines] == [0, 4, 8]
    models = {0: BUNDLED_MODEL, 4: run.path / "checkpoints" / "step-00000004", 8: run.path}
    for step, model in models.items():
        expected = dl.evaluate(model, None, tasks=[str(tasks)])
        assert tasks_of(lines[step]) == pytest.approx(expected, rel=1e-6)
    assert "task/toy_choice/acc_standard_error" in lines[8]
    assert not any("sample_len" in name for name in lines[8])
    values = [lines[step]["task/toy_rolling/bits_per_byte"] for step in lines]
    assert len(set(values)) == 3
    assert "task/toy choice/acc" in (run.path / "report.html").read_text()


@pytest.mark.stage
def test_training_is_the_same_without_tasks(run, tmp_path):
    plain = dl.sft(output_dir=tmp_path / "out", **SFT)
    losses = [[line["loss"] for line in each.metrics if "loss" in line] for each in (run, plain)]
    assert losses[0] == losses[1]


@pytest.mark.stage
@pytest.mark.thorough
@pytest.mark.parametrize("stage", [0, 2])
def test_processes_share_the_questions(run, tasks, launcher, tmp_path, stage):
    """24 questions of two choices, and 23 answers, which two processes cannot share evenly."""
    argv = f"--lora_dim 4 --max_steps 1 --eval_iters 1 --eval_tasks {tasks} --output_dir out"
    argv += f" --eval_tasks_limit 23 --zero_stage {stage} --sample_generations 0"
    found = []
    for size in (1, 2):
        home = tmp_path / str(size)
        home.mkdir()
        running = launcher.start(argv.split(), home, ranks=size)
        assert running.wait() == [0] * size, running.output()
        found.append(tasks_of(metrics(home / "out", "eval")[0]))
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert 0 < found[0]["toy_choice acc"] < 1
    line = next(line for line in run.metrics if line["kind"] == "eval")
    assert found[0]["toy_rolling bits_per_byte"] != tasks_of(line)["toy_rolling bits_per_byte"]


@pytest.mark.stage
def test_unknown_tasks_and_models_that_answer_nothing_are_refused(tasks, tmp_path):
    pytest.importorskip("lm_eval", reason="needs dschat_lora[evaluation]")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"^--eval_tasks \S*empty contains no task"):
        dl.sft(eval_tasks=[str(tmp_path / "empty")], output_dir=tmp_path / "out", **SFT)
    options = {"lora_dim": 4, "eval_tasks": [str(tasks)], "output_dir": tmp_path / "two"}
    with pytest.raises(ValueError, match="--eval_tasks need a language model"):
        dl.reward(**options)
    with pytest.raises(ValueError, match="--eval_tasks are run when held-out rows"):
        dl.sft(data=ROWS, **options, eval_ratio=0.0, quiet=True)


def test_as_many_tokens_are_scored_as_the_model_has_positions():
    pytest.importorskip("lm_eval", reason="needs dschat_lora[evaluation]")
    from dschat_lora.addons.evaluation.harness import HarnessModel
    from dschat_lora.supervised.inference import load_policy

    config = EvalConfig(model_name_or_path=str(BUNDLED_MODEL), tasks=("t",))
    policy = load_policy(config.model)
    own = HarnessModel(policy, batch_size=2)
    size = policy.model.config.max_position_embeddings
    tokens = torch.randint(5, 200, (size + 4,), generator=torch.manual_seed(0)).tolist()
    found = own._loglikelihood_tokens([(None, [3], tokens), (None, tokens[:2], [])])
    kept = torch.tensor(tokens[-size - 1 :])
    logits = policy.model(kept[None, :-1]).logits[0].float().log_softmax(-1)
    assert found[0][0] == pytest.approx(float(logits[range(size), kept[1:]].sum()), rel=1e-5)
    assert found[1] == (0.0, True)  # of no tokens
    # A text of two windows: the second one has the last token of the first as its context.
    own.tok_encode = lambda text: tokens[:16]
    own._positions = size = 8
    halves = [[own.prefix_token_id, *tokens[:8]], tokens[7:16]]
    expected = 0.0
    for ids in map(torch.tensor, halves):
        logits = policy.model(ids[None, :-1]).logits[0].float().log_softmax(-1)
        expected += float(logits[range(size), ids[1:]].sum())
    (rolling,) = own.loglikelihood_rolling([SimpleNamespace(args=("",))])
    assert rolling == pytest.approx(expected, rel=1e-5)
