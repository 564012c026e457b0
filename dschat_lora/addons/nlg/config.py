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
_CARD = "size of GPT-2: the hub's gpt2, gpt2-medium or gpt2-large, where no model is named"
_WEIGHTS = (
    "file of weights under GPT-2's or microsoft/LoRA's names, on the architecture of "
    "--model_name_or_path or --model_card; or what --model_name_or_path takes"
)
_PLATFORM = "accepted from the original; the launcher says what the processes are"


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
        help="output directory of a training, its adapter/ or model/, or a hub name; with "
        "--lora_path the base",
    )
    init_checkpoint: str | None = option(None, help=_WEIGHTS)
    model_card: ModelCard | None = option(None, help=_CARD)
    data_path: tuple[str, ...] = option(
        (), help="files of meanings (.txt .json .jsonl .csv .parquet), with or without references"
    )
    output_path: str = option("predictions.jsonl", help="JSONL file to write, in --work_dir")
    work_dir: str | None = option(None, help="directory of a relative --output_path")
    lora_path: str | None = option(
        None, help="file of LoRA factors alone, to put on --model_name_or_path"
    )
    lora_dim: int | None = option(
        None, help="rank of the factors; checked, for the weights tell it; 0: there are none"
    )
    lora_alpha: float | None = option(
        None, help="alpha of factors that do not say it, as loralib's files do not"
    )
    enable_lora: tuple[str, ...] = option(
        (),
        help="parts of the packed projection in a --lora_path that does not say them: q v, which "
        "is what an --init_checkpoint has when absent",
    )
    num_beams: int = option(10, help="width of the search; 1: greedy")
    length_penalty: float = option(
        0.8, help="a text's log-probability is divided by its tokens to this power"
    )
    no_repeat_ngram_size: int = option(4, help="no n tokens occur twice in a text; 0: they may")
    repetition_penalty: float = option(
        1.0, help="log-probabilities of a text's own tokens are multiplied by this; 1: not at all"
    )
    min_length: int = option(0, help="tokens of a text before it may end")
    max_new_tokens: int = option(64, help="tokens of a text at most")
    seq_len: int | None = option(
        None, help="tokens of a meaning and its text at most; the model's positions when absent"
    )
    eos_token_id: tuple[int, ...] = option(
        (), help="tokens that end a text besides the tokenizer's; 628 is GPT-2's empty line"
    )
    per_device_eval_batch_size: int = option(16, help="meanings at a time on each device")
    dtype: Dtype = option("auto", help="compute type; auto: as in training")
    attn_implementation: Literal["auto", "sdpa", "eager"] = option(
        "auto", help="attention kernel of transformers; auto: sdpa where it has it, else eager"
    )
    trust_remote_code: bool = option(
        False, help="run model code that comes with a hub repository", runs="code"
    )
    seed: int = option(1234, help="accepted from the original; the search draws nothing")
    platform: Literal["local", "k8s", "azure", "philly"] = classic("local", help=_PLATFORM)
    dry_run: bool = option(False, help="check options, files and data, and stop")

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
        (), help="JSONL file that decode wrote; of several the median and deviation are shown"
    )
    references: str | None = option(
        None,
        help="text files in its place: those of a text apart by an empty line, as e2e-metrics "
        "takes them, or with --ref_num N files REFERENCES0, REFERENCES1, ... of one a text",
    )
    hypotheses: str | None = option(None, help="written texts of --references, one a line")
    metrics: tuple[MetricName, ...] = option((), help="those to compute; all when absent")
    profile: Profile = option(
        "e2e",
        help="how texts are prepared: e2e as they are; webnlg, dart split at every sign that is "
        "no letter or digit, in lower case",
    )
    filter: Filter = option(
        "all", help="of WebNLG: the ten categories seen in training, the others, or all"
    )
    ref_num: int | None = option(
        None,
        help="references of a meaning at most, the first ones; 0: all; default: all for e2e, 6 for "
        "webnlg and dart, as in the published scores",
    )
    output_path: str | None = option(None, help="JSON file of the numbers")
    dry_run: bool = option(False, help="check options and files, and stop")

    def __post_init__(self) -> None:
        require_numbers(self, ">= 0", "ref_num")
        if (self.references is None) != (self.hypotheses is None):
            raise ValueError("--references and --hypotheses go together; give both")
        if bool(self.predictions) == (self.references is not None):
            raise ValueError("give --predictions, or --references and --hypotheses")


@dataclass(frozen=True)
class FormatConfig:
    """Write predictions and their references as the original's scorers read them."""

    # names of gpt2_decode.py
    spellings: ClassVar[Mapping[str, str]] = {"sample_file": "predictions", "ref_type": "profile"}

    predictions: str = option(help="JSONL file that decode, or the original's gpt2_beam.py, wrote")
    output_ref_file: str = option(
        help="references: a file for e2e, else a directory of reference0, reference1, ..."
    )
    output_pred_file: str = option(help="written texts, one a line")
    input_file: str | None = option(
        None,
        help="the original's test_formatted.jsonl, whose rows the predictions' `id` counts; they "
        "hold their references themselves when absent",
    )
    vocab: str | None = option(
        None,
        help="directory of GPT-2's encoder.json or vocab.json, for predictions that are token ids "
        "alone",
    )
    profile: Profile = option("e2e", help="e2e: as e2e-metrics; webnlg, dart: as GenerationEval")
    ref_num: int = option(4, help="files of references for webnlg and dart; the first fills gaps")
    tokenize: bool = option(False, help="split at every sign that is no letter or digit")
    lower: bool = option(False, help="write in lower case")
    filter: Filter = option("all", help="of WebNLG: seen or unseen categories, or all")
    dry_run: bool = option(False, help="check options and files, and stop")

    def __post_init__(self) -> None:
        require_numbers(self, ">= 1", "ref_num")


@dataclass(frozen=True)
class NlgOptimConfig(OptimConfig):
    """The optimizer and the schedules of microsoft/LoRA's GPT-2 experiments."""

    lr_scheduler_type: Literal["linear", "cosine", "cycle", "constant"] = option(  # type: ignore[assignment]
        "linear",
        help="shape of the rate over the steps, as in the original; cycle follows --i_steps and "
        "--i_lrs",
    )
    learning_rate: float = option(
        5e-5, help="peak rate of base weights, where they train", when=base_rate_note
    )
    i_steps: str | None = option(
        None, help="steps of --lr_scheduler_type cycle, such as 0,500,26290; the last ends the run"
    )
    i_lrs: str | None = option(
        None, help="learning rates at --i_steps, such as 0,2e-4,0; straight lines lie between"
    )
    scheduler_counts_micro_steps: bool = option(
        False,
        help="--num_warmup_steps, --i_steps and the run's length count micro-batches, as the "
        "original does, and not optimizer steps",
    )
    correct_bias: bool = option(
        True, help="correct Adam's moments for starting at zero (no-: the original's default)"
    )
    decay_after_update: bool = option(
        False, help="decay the weights that the update has made, as the original's AdamW does"
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
        help="share of each target spread over the vocabulary in training, in [0, 1); at most "
        "1e-4 means none",
        section="training",
    )
    init_checkpoint: str | None = option(None, help=_WEIGHTS, section="model")
    model_card: ModelCard | None = option(None, help=_CARD, section="model")
    save_epochs: bool = option(
        False,
        help="keep the factors of every epoch, lora/epoch-1.safetensors and so on, for decode "
        "--lora_path",
        section="output and checkpoints",
    )
    seeds: int = option(
        1,
        help="runs from --seed on, in OUTPUT_DIR/seed-N; seeds.json has the median and the "
        "deviation of their results",
        section="training",
    )
    obj: Literal["clm", "jlm"] = classic("clm", help="jlm: same as --train_on_prompt")
    fp16: bool = classic(False, help="same as --dtype fp16")
    no_decay_bias: bool = classic(False, help="accepted from the original; biases never decay")
    platform: Literal["local", "k8s", "azure", "philly"] = classic("local", help=_PLATFORM)

    def __post_init__(self) -> None:
        require_numbers(self, "in [0, 1)", "label_smooth")
        require_numbers(self, ">= 1", "seeds")

    @property
    def label_smoothing(self) -> float:
        """The share that takes effect; the original ignores one up to 1e-4."""
        return self.label_smooth if self.label_smooth > 1e-4 else 0.0
