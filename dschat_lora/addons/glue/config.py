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
        help="hub name or directory of the base model, or the output directory of an earlier run, "
        "whose adapter is trained further"
    )
    task_name: TaskName = option(help="GLUE task to train and evaluate on")

    # Data.
    data_dir: str | None = of_rows(
        None, help="directory with GLUE's train.tsv and dev.tsv; default: nyu-mll/glue from the hub"
    )
    train_file: str | None = of_rows(None, help="training rows (.tsv .jsonl .csv .parquet)")
    validation_file: str | None = of_rows(None, help="validation rows; MNLI: the matched ones")
    validation_mismatched_file: str | None = of_rows(None, help="MNLI's mismatched rows")
    test_file: str | None = of_rows(None, help="rows of --do_predict")
    test_mismatched_file: str | None = of_rows(
        None, help="test rows of --do_predict for MNLI mismatched"
    )
    bad_rows: Literal["stop", "skip"] = option(
        "stop", help="what to do at an unusable row: stop, or skip and count it"
    )
    max_seq_length: int = option(
        128, help="maximum number of tokens of an input; longer ones are truncated"
    )
    pad_to_max_length: bool = option(
        False, help="pad every input to --max_seq_length, not to the longest in its batch"
    )
    max_train_samples: int | None = option(None, help="train on the first N rows only")
    max_eval_samples: int | None = option(None, help="evaluate on the first N rows only")

    # What is trained.
    apply_lora: bool = option(False, help="train LoRA factors and the head (no-: every weight)")
    lora_r: int = of_lora(8, help="rank of the LoRA update")
    lora_alpha: float = of_lora(16.0, help="the update is scaled by lora_alpha / lora_r")
    lora_dropout: float = of_lora(0.0, help="dropout on the adapter's input, in [0, 1)")
    lora_init: Literal["auto", "uniform", "normal"] = of_lora(
        "auto",
        help="initial distribution of A: uniform U(+-1/sqrt(in)) or normal N(0, 0.02); auto: as in "
        "the original, normal for DeBERTa and uniform for others",
    )
    target_modules: tuple[str, ...] = of_lora(
        (), help="layers to adapt; default: query and value of RoBERTa and DeBERTa-v2"
    )
    lora_path: str | None = option(
        None,
        help="LoRA weights and head to start from: an adapter directory, the output directory of a "
        "run, or a file of LoRA weights; a head of a different shape is dropped",
    )
    classifier_dropout: float | None = option(
        None, help="dropout of the head, in [0, 1); default: the model's own"
    )
    trust_remote_code: bool = option(
        False, help="allow running model code from a hub repository", runs="code"
    )

    apply_adapter: bool = option(
        False, help="train bottleneck adapters and the head instead of LoRA (RoBERTa, BERT)"
    )
    adapter_type: Literal["houlsby", "pfeiffer"] = of_adapters(
        "houlsby",
        help="houlsby: one adapter after attention and one after the feed-forward part of each "
        "layer; pfeiffer: only the second",
    )
    adapter_size: int = of_adapters(64, help="width of the bottleneck")
    adapter_path: str | None = of_adapters(
        None, help="bottleneck_adapter.safetensors of another run, to start from"
    )
    reg_loss_wgt: float = option(
        0.0,
        help="weight of the KL divergence between two passes over each batch (R-Drop); 0: one pass",
    )
    masking_prob: float = option(
        0.0, help="fraction of the second pass's tokens that are masked (token cutoff), in [0, 1)"
    )

    # The Trainer's.
    do_train: bool = option(True, help="run training (no-: evaluate only)")
    do_eval: bool = option(True, help="run evaluation at the end")
    do_predict: bool = option(False, help="write predictions on the test rows at the end")
    learning_rate: float = option(5e-5, help="peak learning rate")
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = option(
        "linear", help="type of learning-rate schedule"
    )
    num_train_epochs: float = option(3.0, help="number of training epochs")
    max_steps: int = option(
        -1, help="number of optimizer steps; overrides --num_train_epochs; -1: by epochs"
    )
    per_device_train_batch_size: int = option(8, help="training batch size per process")
    per_device_eval_batch_size: int = option(8, help="evaluation batch size per process")
    gradient_accumulation_steps: int = option(1, help="batches per optimizer step")
    warmup_ratio: float = option(0.0, help="fraction of the steps used for warm-up, rounded up")
    warmup_steps: int = option(0, help="number of warm-up steps; overrides --warmup_ratio")
    weight_decay: float = option(
        0.0, help="weight decay of all parameters except biases and LayerNorm"
    )
    adam_beta1: float = option(0.9, help="beta1 of AdamW")
    adam_beta2: float = option(0.999, help="beta2 of AdamW")
    adam_epsilon: float = option(1e-8, help="epsilon of AdamW")
    max_grad_norm: float = option(1.0, help="maximum gradient norm for clipping; 0: no clipping")
    eval_strategy: Strategy = option("no", help="when to evaluate, in addition to the end")
    eval_steps: int | None = option(
        None, help="steps between evaluations; default: --logging_steps"
    )
    save_strategy: Strategy = option("steps", help="when to write checkpoint-N")
    save_steps: int = option(500, help="steps between checkpoints of --save_strategy steps")
    save_total_limit: int | None = option(
        None, help="number of newest checkpoints to keep; default: all"
    )
    load_best_model_at_end: bool = option(
        False, help="load the best checkpoint at the end of training; it is always kept"
    )
    metric_for_best_model: str | None = option(
        None,
        help="metric that selects the best model, such as accuracy or loss; default: the task's "
        "first, which the paper reports",
        when="load_best_model_at_end",
    )
    logging_steps: int = option(500, help="steps between logged lines")
    logging_dir: str | None = classic(
        None, help="accepted from the original; metrics go to metrics.jsonl in --output_dir"
    )
    fp16: bool = option(False, help="train in fp16, with loss scaling")
    bf16: bool = option(False, help="train in bf16")
    gradient_checkpointing: bool = option(
        False, help="recompute activations in the backward pass to save memory"
    )
    dataloader_num_workers: int = option(0, help="number of data-loader processes")
    deepspeed: str | None = option(None, help="DeepSpeed JSON, such as configs/ds/zero2.json")

    # Where it goes, and how often the same.
    seed: int = option(
        42, help="random seed of the head, the LoRA weights, the data order and dropout"
    )
    seeds: int = option(
        1,
        help="number of runs with consecutive seeds from --seed, in OUTPUT_DIR/seed-N; seeds.json "
        "has the median and deviation of their metrics",
    )
    use_deterministic_algorithms: bool = option(False, help="use only deterministic operations")
    output_dir: str | None = option(
        None, help="output directory; default: the first free one of output/glue-TASK, -2, -3, ..."
    )
    overwrite_output_dir: bool = option(
        False, help="overwrite the files of an earlier run in --output_dir"
    )
    resume_from_checkpoint: str | None = option(
        None,
        help="resume from a checkpoint: latest (the newest valid one in --output_dir), auto (the "
        "same, or a new run if there is none), a checkpoint-N, or a run's directory; options "
        "that are not given are taken from its run",
    )
    accept_changed_data: bool = option(
        False,
        help="with --resume_from_checkpoint: resume even if the data has changed since the "
        "checkpoint, or cannot be compared",
    )
    distributed_timeout: float = option(
        120.0,
        help="seconds without a sign of life from a process after which the run ends (at least 300 "
        "until the first step is done)",
    )
    dry_run: bool = option(False, help="check options and data, print them, and exit")

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
        wanted = "> 0; --no-do_train only evaluates"
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
