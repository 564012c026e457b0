"""Options of data-to-text training, decoding, formatting and evaluation."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from dschat_lora.algos.schedules import cycle
from dschat_lora.config.addons import addon_options
from dschat_lora.config.data import DataConfig
from dschat_lora.config.groups import (
    BatchConfig,
    Dtype,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    require,
    require_numbers,
)
from dschat_lora.config.options import classic, group, option
from dschat_lora.config.stages import SupervisedConfig
from dschat_lora.config.when import base_rate_note

Profile = Literal["e2e", "webnlg", "dart"]
Filter = Literal["all", "seen", "unseen"]
MetricName = Literal["bleu", "nist", "meteor", "rouge_l", "cider", "ter", "chrf"]
ModelCard = Literal["gpt2.sm", "gpt2.md", "gpt2.lg"]
#: hub name of the base that microsoft/LoRA means by each --model_card
CARDS: Mapping[str, str] = {
    "gpt2.sm": "openai-community/gpt2",
    "gpt2.md": "openai-community/gpt2-medium",
    "gpt2.lg": "openai-community/gpt2-large",
}
_CARD = "size of GPT-2 if no model is given: gpt2, gpt2-medium or gpt2-large from the hub"
_WEIGHTS = (
    "file of weights with GPT-2's or microsoft/LoRA's names, for the architecture of "
    "--model_name_or_path or --model_card; or any value of --model_name_or_path"
)
_PLATFORM = "accepted from the original; the launcher sets the processes"


@dataclass(frozen=True)
class DecodeConfig:
    """Write a text to every meaning of data files by beam search, one JSON line for each."""

    # microsoft/LoRA's names
    spellings: ClassVar[Mapping[str, str]] = {
        "data": "data_path",
        "output_file": "output_path",
        "beam": "num_beams",
        "eval_len": "max_new_tokens",
        "batch_size": "per_device_eval_batch_size",
        "random_seed": "seed",
    }

    model_name_or_path: str | None = option(
        None,
        help="output directory of a run, its adapter/ or model/, or a hub name; with --lora_path "
        "the base model",
    )
    init_checkpoint: str | None = option(None, help=_WEIGHTS)
    model_card: ModelCard | None = option(None, help=_CARD)
    data_path: tuple[str, ...] = option(
        (),
        help="files of meaning representations (.txt .json .jsonl .csv .parquet), with or without "
        "references",
    )
    output_path: str = option(
        "predictions.jsonl", help="JSONL file to write, relative to --work_dir"
    )
    work_dir: str | None = option(None, help="directory for a relative --output_path")
    lora_path: str | None = option(
        None, help="file with LoRA weights only, applied to --model_name_or_path"
    )
    lora_dim: int | None = option(
        None, help="rank of the LoRA weights, checked against the file; 0: no LoRA"
    )
    lora_alpha: float | None = option(
        None, help="lora_alpha of a file that does not record it, such as loralib's"
    )
    enable_lora: tuple[str, ...] = option(
        (),
        help="parts of the packed projection in a --lora_path that does not record them; default: "
        "q v, as for an --init_checkpoint",
    )
    num_beams: int = option(10, help="number of beams; 1: greedy decoding")
    length_penalty: float = option(
        0.8, help="exponent of the length by which a text's log-probability is divided"
    )
    no_repeat_ngram_size: int = option(
        4, help="n-grams of this size can occur only once in a text; 0: no limit"
    )
    repetition_penalty: float = option(
        1.0, help="factor on the log-probabilities of tokens that a text already has; 1: no penalty"
    )
    min_length: int = option(0, help="minimum number of tokens of a text")
    max_new_tokens: int = option(64, help="maximum number of tokens of a text")
    seq_len: int | None = option(
        None,
        help="maximum number of tokens of input and text together; default: the model's positions",
    )
    eos_token_id: tuple[int, ...] = option(
        (), help="ids of further tokens that end a text; 628 is GPT-2's empty line"
    )
    per_device_eval_batch_size: int = option(16, help="inputs per device")
    dtype: Dtype = option("auto", help="compute dtype; auto: as in training")
    attn_implementation: Literal["auto", "sdpa", "eager"] = option(
        "auto",
        help="attention implementation of transformers; auto: sdpa if the model supports it, else "
        "eager",
    )
    trust_remote_code: bool = option(
        False, help="allow running model code from a hub repository", runs="code"
    )
    seed: int = option(1234, help="accepted from the original; beam search samples nothing")
    platform: Literal["local", "k8s", "azure", "philly"] = classic("local", help=_PLATFORM)
    dry_run: bool = option(False, help="check options, files and data, and exit")

    def __post_init__(self) -> None:
        require(bool(self.data_path), "data_path", "nothing", "a file or more of meanings")
        require_numbers(self, ">= 1", "max_new_tokens", "per_device_eval_batch_size")
        require_numbers(self, ">= 0", "no_repeat_ngram_size", "min_length")
        # More are too many for the memory, and lengths to a higher power for a float.
        require(1 <= self.num_beams <= 1000, "num_beams", self.num_beams, "in [1, 1000]")
        require(0 <= self.length_penalty <= 10, "length_penalty", self.length_penalty, "in [0, 10]")
        require_numbers(self, ">= 0", "lora_dim")
        require_numbers(self, "> 0", "repetition_penalty", "lora_alpha")
        for value in self.eos_token_id:
            require(value >= 0, "eos_token_id", value, ">= 0")
        least, most = self.min_length, self.max_new_tokens
        require(least <= most, "min_length", least, f"at most --max_new_tokens {most}")

    @property
    def model(self) -> ModelConfig:
        """Options of loading the model."""
        return ModelConfig(
            model_name_or_path=self.model_name_or_path,
            dtype=self.dtype,
            attn_implementation=self.attn_implementation,
            trust_remote_code=self.trust_remote_code,
        )


@dataclass(frozen=True)
class EvaluateConfig:
    """Compare written texts with their references, by every metric of the field."""

    predictions: tuple[str, ...] = option(
        (), help="JSONL file written by decode; for several the median and deviation are shown"
    )
    references: str | None = option(
        None,
        help="text files instead: references of one text per block, with empty lines between "
        "blocks, as in e2e-metrics, or with --ref_num N files REFERENCES0, REFERENCES1, ... "
        "with one reference per text",
    )
    hypotheses: str | None = option(None, help="generated texts for --references, one per line")
    metrics: tuple[MetricName, ...] = option((), help="metrics to compute; default: all")
    profile: Profile = option(
        "e2e",
        help="preprocessing of texts: e2e leaves them as they are; webnlg and dart split at every "
        "character that is not a letter or digit, and lowercase",
    )
    filter: Filter = option(
        "all", help="WebNLG: the ten categories seen in training, the unseen ones, or all"
    )
    ref_num: int | None = option(
        None,
        help="use only the first N references of each input; 0: all; default: all for e2e, 6 for "
        "webnlg and dart, as in the published scores",
    )
    output_path: str | None = option(None, help="JSON file to write the scores to")
    dry_run: bool = option(False, help="check options and files, and exit")

    def __post_init__(self) -> None:
        require_numbers(self, ">= 0", "ref_num")
        if (self.references is None) != (self.hypotheses is None):
            raise ValueError("--references and --hypotheses must be given together")
        if bool(self.predictions) == (self.references is not None):
            raise ValueError("give --predictions, or --references and --hypotheses")


@dataclass(frozen=True)
class FormatConfig:
    """Write predictions and their references as the original's scorers read them."""

    # names of gpt2_decode.py
    spellings: ClassVar[Mapping[str, str]] = {"sample_file": "predictions", "ref_type": "profile"}

    predictions: str = option(
        help="JSONL file written by decode, or by the original's gpt2_beam.py"
    )
    output_ref_file: str = option(
        help="references to write: a file for e2e, else a directory of reference0, reference1, ..."
    )
    output_pred_file: str = option(help="generated texts to write, one per line")
    input_file: str | None = option(
        None,
        help="the original's test_formatted.jsonl, into which the predictions' `id` points; "
        "default: the references in the predictions",
    )
    vocab: str | None = option(
        None,
        help="directory with GPT-2's encoder.json or vocab.json, for predictions that are token "
        "ids only",
    )
    profile: Profile = option("e2e", help="e2e: as e2e-metrics; webnlg, dart: as GenerationEval")
    ref_num: int = option(
        4, help="number of reference files for webnlg and dart; missing references repeat the first"
    )
    tokenize: bool = option(False, help="split at every character that is not a letter or digit")
    lower: bool = option(False, help="lowercase the texts")
    filter: Filter = option("all", help="WebNLG: seen or unseen categories, or all")
    dry_run: bool = option(False, help="check options and files, and exit")

    def __post_init__(self) -> None:
        require_numbers(self, ">= 1", "ref_num")


@dataclass(frozen=True)
class NlgOptimConfig(OptimConfig):
    """The optimizer and the schedules of microsoft/LoRA's GPT-2 experiments."""

    lr_scheduler_type: Literal["linear", "cosine", "cycle", "constant"] = option(  # type: ignore[assignment]
        "linear",
        help="type of learning-rate schedule, as in the original; cycle follows --i_steps and "
        "--i_lrs",
    )
    learning_rate: float = option(
        5e-5, help="peak learning rate of base weights, if they are trained", when=base_rate_note
    )
    i_steps: str | None = option(
        None,
        help="steps of --lr_scheduler_type cycle, such as 0,500,26290; the run ends at the last",
    )
    i_lrs: str | None = option(
        None,
        help="learning rates at --i_steps, such as 0,2e-4,0, with linear interpolation between",
    )
    scheduler_counts_micro_steps: bool = option(
        False,
        help="count --num_warmup_steps, --i_steps and the length of the run in micro-batches, as "
        "the original does, instead of optimizer steps",
    )
    correct_bias: bool = option(
        True, help="use Adam's bias correction (no-: the original's default)"
    )
    decay_after_update: bool = option(
        False, help="apply weight decay after the update, as the original's AdamW does"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        is_cycle = self.lr_scheduler_type == "cycle"
        for name in ("i_steps", "i_lrs"):
            if (getattr(self, name) is not None) != is_cycle:
                wanted = "needs" if is_cycle else "alone takes"
                raise ValueError(f"--lr_scheduler_type cycle {wanted} --{name}")
        if is_cycle:
            steps, rates = self.cycle_points
            cycle(0, steps=steps, rates=rates)

    @property
    def cycle_points(self) -> tuple[list[int], list[float]]:
        """Steps and rates of a cycle.

        Raises:
            ValueError: naming the option that holds no list of numbers.
        """

        def numbers(name: str, kind: Callable[[str], float]) -> list[Any]:
            text = getattr(self, name) or ""
            try:
                values = [kind(part) for part in text.split(",")]
            except ValueError:
                values = []
            usable = bool(values) and all(math.isfinite(n) and n >= 0 for n in values)
            require(usable, name, text, "numbers >= 0 with commas between")
            return values

        return numbers("i_steps", int), numbers("i_lrs", float)


@dataclass(frozen=True)
class NlgConfig(SupervisedConfig):
    """Options of training GPT-2 to put data into words."""

    # microsoft/LoRA's names
    spellings: ClassVar[Mapping[str, str]] = {
        "train_data": "data_path",
        "valid_data": "eval_data_path",
        "train_batch_size": "per_device_train_batch_size",
        "valid_batch_size": "per_device_eval_batch_size",
        "grad_acc": "gradient_accumulation_steps",
        "seq_len": "max_seq_len",
        "lr": "learning_rate",
        "adam_epislon": "adam_epsilon",
        "clip": "max_grad_norm",
        "scheduler": "lr_scheduler_type",
        "warmup_step": "num_warmup_steps",
        "max_epoch": "num_train_epochs",
        "max_step": "max_steps",
        "log_interval": "logging_steps",
        "random_seed": "seed",
        "work_dir": "output_dir",
    }

    stage: ClassVar[str] = "nlg"
    lora: LoraConfig = group(LoraConfig, lora_dim=4)
    data: DataConfig = group(DataConfig, packing=False, eos_after_prompt=True)
    batch: BatchConfig = group(
        BatchConfig, per_device_train_batch_size=8, per_device_eval_batch_size=4
    )
    optim: NlgOptimConfig = group(
        NlgOptimConfig,
        learning_rate=1e-5,
        default_lora_learning_rate=None,
        weight_decay=0.01,
        adam_beta2=0.98,
        adam_epsilon=1e-6,
        max_grad_norm=0.0,
        num_train_epochs=5,
    )
    when: ClassVar[Mapping[str, str]] = {"num_warmup_steps": ""}  # a constant rate warms up too
    addons: Any = group(addon_options("nlg"))
    run: RunConfig = group(
        RunConfig, merge_adapter=True, eval_interval=2000, logging_steps=100, save_interval=500
    )
    label_smooth: float = option(
        0.0,
        help="label smoothing in training, in [0, 1); at most 1e-4 means none",
        section="training",
    )
    init_checkpoint: str | None = option(None, help=_WEIGHTS, section="model")
    model_card: ModelCard | None = option(None, help=_CARD, section="model")
    save_epochs: bool = option(
        False,
        help="save the LoRA weights of every epoch as lora/epoch-1.safetensors and so on, for "
        "decode --lora_path",
        section="output and checkpoints",
    )
    seeds: int = option(
        1,
        help="number of runs with consecutive seeds from --seed, in OUTPUT_DIR/seed-N; seeds.json "
        "has the median and deviation of their results",
        section="training",
    )
    obj: Literal["clm", "jlm"] = classic("clm", help="jlm is the same as --train_on_prompt")
    fp16: bool = classic(False, help="same as --dtype fp16")
    no_decay_bias: bool = classic(
        False, help="accepted from the original; weight decay never applies to biases"
    )
    platform: Literal["local", "k8s", "azure", "philly"] = classic("local", help=_PLATFORM)

    def __post_init__(self) -> None:
        require_numbers(self, "in [0, 1)", "label_smooth")
        require_numbers(self, ">= 1", "seeds")

    @property
    def label_smoothing(self) -> float:
        """The share that takes effect; the original ignores one up to 1e-4."""
        return self.label_smooth if self.label_smooth > 1e-4 else 0.0
