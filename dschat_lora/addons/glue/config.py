"""The nine GLUE tasks, and options of training on one, under the names of transformers' Trainer."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from dschat_lora.config.groups import ParallelConfig, require, require_numbers
from dschat_lora.config.options import classic, given_options, hidden, option, option_names

TaskName = Literal["cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli"]
Measure = Literal["accuracy", "f1", "matthews_correlation", "pearson", "spearmanr"]
Strategy = Literal["no", "steps", "epoch"]


@dataclass(frozen=True)
class GlueTask:
    """A GLUE task (arXiv:1804.07461): its columns, labels and measures."""

    folder: str  # of GLUE's own download
    texts: tuple[str, ...]  # columns of one or two texts, by their names on the hub
    labels: tuple[str, ...]  # in the hub's order, which numbers them; none for a regression
    measures: tuple[Measure, ...] = ("accuracy",)  # of several there is a mean, combined_score
    tsv_label: str = "label"  # in the header of GLUE's own files
    own_tsv_texts: tuple[str, ...] = ()  # there, where they are others than the hub's

    @property
    def tsv_texts(self) -> tuple[str, ...]:
        """The columns of texts in the header of GLUE's own files."""
        return self.own_tsv_texts or self.texts

    @property
    def is_regression(self) -> bool:
        """Whether a number is to be found, by mean squared error."""
        return not self.labels

    @property
    def num_labels(self) -> int:
        """Outputs of the model."""
        return len(self.labels) or 1


_ENTAILMENT = ("entailment", "not_entailment")
_TWO = ("sentence1", "sentence2")
_QUESTIONS, _STRINGS = ("question1", "question2"), ("#1 String", "#2 String")
_EQUIVALENT, _DUPLICATE = ("not_equivalent", "equivalent"), ("not_duplicate", "duplicate")
_BOTH: tuple[Measure, ...] = ("accuracy", "f1")

TASKS: dict[str, GlueTask] = {
    "cola": GlueTask(
        "CoLA",
        ("sentence",),
        ("unacceptable", "acceptable"),
        ("matthews_correlation",),
    ),
    "sst2": GlueTask("SST-2", ("sentence",), ("negative", "positive")),
    "mrpc": GlueTask("MRPC", _TWO, _EQUIVALENT, _BOTH, "Quality", _STRINGS),
    "qqp": GlueTask("QQP", _QUESTIONS, _DUPLICATE, _BOTH, "is_duplicate"),
    "stsb": GlueTask("STS-B", _TWO, (), ("pearson", "spearmanr"), "score"),
    "mnli": GlueTask(
        "MNLI",
        ("premise", "hypothesis"),
        ("entailment", "neutral", "contradiction"),
        tsv_label="gold_label",
        own_tsv_texts=_TWO,
    ),
    "qnli": GlueTask("QNLI", ("question", "sentence"), _ENTAILMENT),
    "rte": GlueTask("RTE", _TWO, _ENTAILMENT),
    "wnli": GlueTask("WNLI", _TWO, _ENTAILMENT[::-1]),
}

# Their product with the number of processes stays on resuming, not each of them.
_ROWS = ("per_device_train_batch_size", "gradient_accumulation_steps")
# Where rows come from: one that is typed on resuming does away with the others.
_SOURCES = (
    *("data_dir", "train_file", "validation_file", "validation_mismatched_file", "test_file"),
    "test_mismatched_file",
)
# Options that may change on resuming; all others give the state of the Trainer its meaning.
_FREE = frozenset(
    (
        *(*_SOURCES, *_ROWS, "bad_rows", "max_eval_samples", "pad_to_max_length"),
        *("trust_remote_code", "do_train", "do_eval", "do_predict", "per_device_eval_batch_size"),
        *("eval_strategy", "eval_steps", "save_strategy", "save_steps", "save_total_limit"),
        *("logging_steps", "gradient_checkpointing", "dataloader_num_workers", "logging_dir"),
        *("use_deterministic_algorithms", "distributed_timeout", "output_dir", "seeds"),
        *("overwrite_output_dir", "resume_from_checkpoint", "accept_changed_data", "dry_run"),
        "model_name_or_path",
    )
)
_AT_LEAST_ONE = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
    *("logging_steps", "save_steps", "max_seq_length", "lora_r"),
    *("eval_steps", "save_total_limit", "max_train_samples", "max_eval_samples"),
    *("adapter_size", "seeds"),
)
of_lora = partial(option, when="apply_lora")
of_rows = partial(option, replaces=_SOURCES)
of_adapters = partial(option, when="apply_adapter")


@dataclass(frozen=True)
class GlueConfig:
    """Fine-tune a pretrained encoder on one GLUE task, with LoRA or in full."""

    # names of the original and of an older Trainer
    spellings: ClassVar[Mapping[str, str]] = {
        "cls_dropout": "classifier_dropout",
        "evaluation_strategy": "eval_strategy",
    }

    model_name_or_path: str = option(
        help="hub name or local directory of the base model, or the output directory of an "
        "earlier run, whose adapter is gone on with"
    )
    task_name: TaskName = option(help="one of the nine GLUE tasks")

    # Data.
    data_dir: str | None = of_rows(
        None, help="directory of GLUE's own train.tsv and dev.tsv; the hub's nyu-mll/glue if absent"
    )
    train_file: str | None = of_rows(None, help="rows to train on (.tsv .jsonl .csv .parquet)")
    validation_file: str | None = of_rows(None, help="rows to evaluate on; MNLI: the matched ones")
    validation_mismatched_file: str | None = of_rows(None, help="MNLI's mismatched rows")
    test_file: str | None = of_rows(None, help="rows of --do_predict")
    test_mismatched_file: str | None = of_rows(None, help="MNLI's mismatched rows of --do_predict")
    bad_rows: Literal["stop", "skip"] = option(
        "stop", help="on a row that cannot be used: stop, or count it and go on"
    )
    max_seq_length: int = option(128, help="tokens of an input; longer ones are cut")
    pad_to_max_length: bool = option(
        False, help="pad every input to --max_seq_length, not to the longest of its batch"
    )
    max_train_samples: int | None = option(None, help="train on the first N rows alone")
    max_eval_samples: int | None = option(None, help="evaluate on the first N rows alone")

    # What is trained.
    apply_lora: bool = option(False, help="train LoRA factors and the head (no-: every weight)")
    lora_r: int = of_lora(8, help="rank of the update")
    lora_alpha: float = of_lora(16.0, help="the update is scaled by lora_alpha / lora_r")
    lora_dropout: float = of_lora(0.0, help="dropout on the adapter's input, in [0, 1)")
    lora_init: Literal["auto", "uniform", "normal"] = of_lora(
        "auto",
        help="distribution of A at the start: uniform U(+-1/sqrt(in)), normal N(0, 0.02); auto: "
        "as the original, normal in DeBERTa and uniform in others",
    )
    target_modules: tuple[str, ...] = of_lora(
        (), help="layers to adapt; query and value of RoBERTa and DeBERTa-v2 when absent"
    )
    lora_path: str | None = option(
        None,
        help="factors and head to start from: an adapter directory, the output directory of a "
        "run, or a file of LoRA weights; a head of other shape is dropped",
    )
    classifier_dropout: float | None = option(
        None, help="dropout of the head, in [0, 1); the model's own when absent"
    )
    trust_remote_code: bool = option(
        False, help="run model code that comes with a hub repository", runs="code"
    )

    apply_adapter: bool = option(
        False, help="train bottleneck adapters and the head, in place of LoRA (RoBERTa, BERT)"
    )
    adapter_type: Literal["houlsby", "pfeiffer"] = of_adapters(
        "houlsby",
        help="houlsby: an adapter after attention and one after the feed-forward part of each "
        "layer; pfeiffer: the second alone",
    )
    adapter_size: int = of_adapters(64, help="width of the bottleneck")
    adapter_path: str | None = of_adapters(
        None, help="bottleneck_adapter.safetensors of another run, to start from"
    )
    reg_loss_wgt: float = option(
        0.0, help="weight of the divergence of two passes over each batch (R-Drop); 0: one pass"
    )
    masking_prob: float = option(
        0.0, help="share of the second pass's tokens that become unknown (token cutoff), in [0, 1)"
    )

    # The Trainer's.
    do_train: bool = option(True, help="train (no-: evaluate what is there)")
    do_eval: bool = option(True, help="evaluate at the end")
    do_predict: bool = option(False, help="write predictions for the test rows at the end")
    learning_rate: float = option(5e-5, help="peak learning rate")
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = option(
        "linear", help="shape of the schedule"
    )
    num_train_epochs: float = option(3.0, help="passes over the training rows")
    max_steps: int = option(-1, help="optimizer steps instead of epochs; -1: by epochs")
    per_device_train_batch_size: int = option(8, help="rows of a process at a time")
    per_device_eval_batch_size: int = option(8, help="rows evaluated by a process at a time")
    gradient_accumulation_steps: int = option(1, help="batches of an optimizer step")
    warmup_ratio: float = option(0.0, help="share of the steps to warm up over, rounded up")
    warmup_steps: int = option(0, help="steps to warm up over, instead of --warmup_ratio")
    weight_decay: float = option(0.0, help="decay of all but biases and LayerNorm")
    adam_beta1: float = option(0.9, help="decay of the first moment")
    adam_beta2: float = option(0.999, help="decay of the second moment")
    adam_epsilon: float = option(1e-8, help="added to the root of the second moment")
    max_grad_norm: float = option(1.0, help="clip gradients to this norm; 0: do not")
    eval_strategy: Strategy = option("no", help="when to evaluate, besides the end")
    eval_steps: int | None = option(None, help="steps between; default: as --logging_steps")
    save_strategy: Strategy = option("steps", help="when to write checkpoint-N")
    save_steps: int = option(500, help="steps between checkpoints of --save_strategy steps")
    save_total_limit: int | None = option(None, help="newest checkpoints kept; all when absent")
    load_best_model_at_end: bool = option(
        False, help="end with the weights of the best evaluation, which is kept as a checkpoint"
    )
    metric_for_best_model: str | None = option(
        None,
        help="measure that tells the best evaluation, such as accuracy or loss; default: the "
        "task's first, which the paper reports",
        when="load_best_model_at_end",
    )
    logging_steps: int = option(500, help="steps between lines of training")
    logging_dir: str | None = classic(
        None, help="accepted from the original; numbers go to metrics.jsonl of --output_dir"
    )
    fp16: bool = option(False, help="compute in fp16, with a scaled loss")
    bf16: bool = option(False, help="compute in bf16")
    gradient_checkpointing: bool = option(
        False, help="recompute activations in the backward pass instead of keeping them"
    )
    dataloader_num_workers: int = option(0, help="processes that prepare batches")
    deepspeed: str | None = option(None, help="DeepSpeed JSON, such as configs/ds/zero2.json")

    # Where it goes, and how often the same.
    seed: int = option(42, help="seed of the head, the factors, the order and dropout")
    seeds: int = option(
        1,
        help="runs from --seed on, in OUTPUT_DIR/seed-N; seeds.json has the median and the "
        "deviation of their measures",
    )
    use_deterministic_algorithms: bool = option(
        False, help="refuse operations whose result depends on timing"
    )
    output_dir: str | None = option(
        None, help="what the run writes; default: the first free of output/glue-TASK, -2, -3, ..."
    )
    overwrite_output_dir: bool = option(
        False, help="delete what an earlier run left in --output_dir"
    )
    resume_from_checkpoint: str | None = option(
        None,
        help="go on from a checkpoint: latest (the newest sound one of --output_dir), auto (the "
        "same, or a fresh start where there is none), a checkpoint-N, or a run's directory; "
        "options not typed are those of its run",
    )
    accept_changed_data: bool = option(
        False,
        help="with --resume_from_checkpoint: go on where the data are not those of the checkpoint, "
        "or cannot be compared with them",
    )
    distributed_timeout: float = option(
        120.0,
        help="seconds after which a process that is not heard of ends the run (300 at least until "
        "the first step is over)",
    )
    dry_run: bool = option(False, help="check options and data, print, and stop")

    given: frozenset[str] = given_options()
    # as of the other stages
    checkpoint: str | None = hidden(None)
    rejected: tuple[str, ...] = hidden(())

    def __post_init__(self) -> None:
        require_numbers(self, ">= 1", *_AT_LEAST_ONE)
        require_numbers(self, "in [0, 1)", "classifier_dropout", "lora_dropout", "warmup_ratio")
        require_numbers(self, "in [0, 1)", "masking_prob")
        at_least_zero = ("weight_decay", "max_grad_norm", "warmup_steps", "dataloader_num_workers")
        require_numbers(self, ">= 0", *at_least_zero, "reg_loss_wgt")
        positive = ("learning_rate", "lora_alpha", "distributed_timeout")
        require_numbers(self, "> 0", *positive)
        wanted = "> 0; --no-do_train evaluates alone"
        require(self.num_train_epochs > 0, "num_train_epochs", self.num_train_epochs, wanted)
        require(self.max_steps == -1 or self.max_steps >= 1, "max_steps", self.max_steps, ">= 1")
        # What NumPy's generator takes.
        require(0 <= self.seed < 2**32, "seed", self.seed, "in [0, 2**32)")

    @property
    def run(self) -> "GlueConfig":
        """The options of where it writes, which other stages have in a group."""
        return self

    @property
    def parallel(self) -> ParallelConfig:
        """Each process has a share of the rows of its own."""
        return ParallelConfig()

    @property
    def fixed(self) -> frozenset[str]:
        """Options that cannot change on resuming."""
        return frozenset(option_names(GlueConfig)) - _FREE

    @property
    def rows(self) -> Mapping[str, tuple[str, ...]]:
        """The rows of an optimizer step."""
        return {"rows_per_step": _ROWS}

    @property
    def stage(self) -> str:
        """The stage in its default output directory and in its checkpoints."""
        return f"glue-{self.task_name}"

    @property
    def best_metric(self) -> str:
        """The measure that tells the best evaluation."""
        return self.metric_for_best_model or self.task.measures[0]

    @property
    def task(self) -> GlueTask:
        """The task's columns, labels and measures."""
        return TASKS[self.task_name]
