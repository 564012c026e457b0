"""Tiny encoders and GLUE's files, made once, and whole runs in this process."""

import pytest

from helpers.glue_toys import LORA, save_encoder, write_task


@pytest.fixture(scope="session")
def encoder(tmp_path_factory):
    """``encoder(kind)``: directory of a tiny pretrained roberta or deberta-v2."""
    root = tmp_path_factory.mktemp("encoders")

    def of_kind(kind):
        if not (root / kind).exists():
            save_encoder(kind, root / kind)
        return root / kind

    return of_kind


@pytest.fixture(scope="session")
def task_files(tmp_path_factory):
    """``task_files(task)``: directory of the task's own files, 24 rows to train and 12 others."""
    root = tmp_path_factory.mktemp("glue_data")

    def of_task(task):
        if not (root / task).exists():
            write_task(task, root / task)
        return root / task

    return of_task


@pytest.fixture
def checked(encoder, task_files):
    """``checked(*options, task=)``: the config of these options, checked."""
    from dschat_lora.addons.glue.config import GlueConfig
    from dschat_lora.addons.glue.validation import check_glue
    from dschat_lora.config.options import parse_config

    def call(*options, task="rte"):
        argv = ["--model_name_or_path", encoder("roberta"), "--task_name", task]
        argv += ["--data_dir", task_files(task), *options]
        return check_glue(parse_config(GlueConfig, [str(each) for each in argv]))

    return call


@pytest.fixture(scope="session")
def glue_run(encoder, task_files):
    """``glue_run(directory, task, *options, kind=)``: a run that is finished; its directory."""
    from dschat_lora.addons.glue.config import GlueConfig
    from dschat_lora.addons.glue.train import run_glue
    from dschat_lora.addons.glue.validation import check_glue
    from dschat_lora.config.options import parse_config
    from dschat_lora.runtime.stage_main import exits

    def run(directory, task, *options, kind="roberta"):
        argv = [
            *("--model_name_or_path", encoder(kind), "--task_name", task),
            *("--data_dir", task_files(task), "--output_dir", directory, *options),
        ]
        exits(run_glue)(check_glue(parse_config(GlueConfig, [str(each) for each in argv])))
        return directory

    return run


@pytest.fixture(scope="session")
def trained(glue_run, tmp_path_factory):
    """A MNLI run with LoRA, evaluated and saved after step 3 and after step 6, its last."""
    return glue_run(
        tmp_path_factory.mktemp("trained") / "out",
        "mnli",
        *LORA,
        *("--num_train_epochs", "2", "--eval_strategy", "epoch", "--save_strategy", "epoch"),
        *("--do_predict", "--weight_decay", "0.1"),
    )
