"""Groups of options, by the part of the package that uses them, and their validation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from dschat_lora.config.options import classic, hidden, option
from dschat_lora.config.parser import EVALUATION, LOGGING, PROCESSES
from dschat_lora.config.values import parse_rope_scaling
from dschat_lora.config.when import base_rate_note

Dtype = Literal["auto", "fp32", "bf16", "fp16"]
Switch = bool | Literal["auto"]
Rate = float | Literal["auto"]
Scheduler = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"
]
# In the description of an adapter that has them: PEFT's rank_pattern and alpha_pattern.
OWN_SETTINGS = "modules of another rank or alpha"
# of an adapter, where none is given
DEFAULT_RANK = (
    "16 (training/ and --config: 0)\nthe 0 is of the scripts of training/; by default an adapter "
    "that is continued keeps its rank"
)
of_adapters = partial(option, when="lora_dim")


def require(condition: bool, name: str, value: object, allowed: str) -> None:
    """Raise a ValueError that names the option, its value and what is allowed."""
    if not condition:
        raise ValueError(f"--{name} must be {allowed}, got {value!r}")


_RANGES: Mapping[str, Callable[[float], bool]] = {
    ">= 0": lambda number: number >= 0,
    ">= 1": lambda number: number >= 1,
    "> 0": lambda number: number > 0,
    # That of a temperature, by which logits are divided in fp32.
    ">= 1e-06 (greedy: --no-do_sample)": lambda number: number >= 1e-6,
    ">= 1e-06, or 0 (greedy)": lambda number: number == 0 or number >= 1e-6,
    "in [0, 1)": lambda number: 0 <= number < 1,
    "in [0, 16]": lambda number: 0 <= number <= 16,
    "in [1, 10]": lambda number: 1 <= number <= 10,
    "in [0, 1]": lambda number: 0 <= number <= 1,
}


def require_numbers(config: object, allowed: str, *names: str, prefix: str = "") -> None:
    """Raise a ValueError at the first of these options that is outside a range.

    None passes, and a word that stands for a number.
    """
    for name in names:
        value = getattr(config, name)
        passes = value is None or isinstance(value, str) or _RANGES[allowed](value)
        require(passes, prefix + name, value, allowed)


def is_on(switch: Switch) -> bool:
    """Whether a switch is on; ``auto`` is off until it is resolved."""
    return switch is True


@dataclass(frozen=True)
class LoadConfig:
    """Loading of models, and the kernels that compute them."""

    section = "model"

    dtype: Dtype = option(
        "auto",
        help="compute type; auto: bf16 where the GPU has it, fp16 on older GPUs, fp32 on CPU",
        section=PROCESSES,
    )
    attn_implementation: Literal["auto", "sdpa", "flex_attention", "eager"] = option(
        "auto",
        help="attention kernel; auto: sdpa where the architecture has it, else eager; sdpa "
        "computes each sequence of a row alone where it can, flex_attention is for GPUs where it "
        "cannot",
        section=PROCESSES,
        hint="sdpa runs PyTorch's flash attention where the GPU has it, of packed rows too",
    )
    trust_remote_code: bool = option(
        False, help="run model code that comes with a hub repository", runs="code"
    )
    base_bits: Literal[16, 4] | None = option(
        None,
        help="bits of the frozen base: 16, or 4 (QLoRA); default: the loaded adapter's, else 16\n"
        "4 is NF4, for linear layers and experts of the blocks; an adapter's are those with which "
        "it was trained",
        section=PROCESSES,
    )
    add_eot_token: bool = option(
        False, help="add --eot_token to the tokenizer and end every completion with it"
    )
    eot_token: str = option(
        "<|endoftext|>", help="end-of-text token of --add_eot_token", when="add_eot_token"
    )
    chat_template: str | None = option(
        None,
        help="Jinja file that renders messages, in place of the tokenizer's own; saved with the "
        "result",
    )
    fused_kernels: Literal["auto", "on", "off"] = option(
        "auto",
        help="compute RMSNorm, SwiGLU and rotary embeddings by fewer kernels, where the "
        "architecture's are found equal to them; auto: on a GPU",
        section=PROCESSES,
    )
    compile: bool = option(
        False,
        help="compile the model's blocks (torch.compile): slow to start, faster from then on",
        section=PROCESSES,
    )
    training_graphs: Literal["auto", "on", "off"] = option(
        "auto",
        help="replay the passes of training below the head as CUDA graphs; auto: where launching "
        "kernels would take longer than their work\nmicro-batches are padded to a few shapes; at "
        "ZeRO 0, without dropout",
        section=PROCESSES,
    )
    compute_fp32_loss: bool = classic(
        True, help="accepted from DeepSpeed-Chat; the loss is always computed in fp32"
    )

    def __post_init__(self) -> None:
        require(self.compute_fp32_loss, "no-compute_fp32_loss", False, "absent: the loss is fp32")
        if self.compile and self.training_graphs == "on":
            why = "--compile makes other operations of the blocks; use auto or off"
            raise ValueError(f"--training_graphs on: {why}")


@dataclass(frozen=True)
class ModelConfig(LoadConfig):
    """The one model of a supervised stage."""

    model_name_or_path: str | None = option(
        None,
        help="hub name, model directory or output of an earlier stage; the bundled tiny model when "
        "absent\nor a GGUF file, one of the hub as repository:file.gguf",
    )
    gradient_checkpointing: Switch = option(
        "auto",
        help="recompute activations to save memory; auto: where they would not fit\nin the "
        "backward pass, instead of keeping them; without a value on; auto goes by an estimate, and "
        "on a GPU divides micro-batches whose size is not given, where that is faster",
        section=PROCESSES,
    )
    dropout: float = option(0.0, help="every dropout probability of the base model, in [0, 1)")
    router_aux_loss_coef: float = option(
        0.0,
        help="SFT's loss grows by this times the load-balancing loss that the model has for its "
        "experts; 0: without",
    )
    rope_scaling: str | None = option(
        None,
        help="JSON object by which rotary position embeddings reach longer rows, in transformers' "
        """words, such as '{"rope_type": "yarn", "factor": 4.0}' (or linear, llama3); default: """
        "that with which the adapter that is loaded was trained, else the model's own",
    )
    neftune_noise_alpha: float = option(
        0.0,
        help="SFT: uniform noise of up to this / sqrt(L d) on the embeddings in training (NEFTune; "
        "5 to 15), L the tokens of a sequence and d the width; 0: none",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(self, "in [0, 1)", "dropout")
        require_numbers(self, ">= 0", "router_aux_loss_coef", "neftune_noise_alpha")
        parse_rope_scaling(self.rope_scaling)


@dataclass(frozen=True)
class LoraConfig:
    section = "LoRA"

    lora_dim: int = option(
        0, help="rank of the adapters; 0 trains every weight", settled=DEFAULT_RANK
    )
    lora_alpha: float = of_adapters(32.0, help="the update is scaled by lora_alpha / lora_dim")
    lora_dropout: float = of_adapters(0.0, help="dropout on the adapter's input, in [0, 1)")
    use_rslora: bool = of_adapters(
        False, help="scale by lora_alpha / sqrt(lora_dim) (rank-stabilised LoRA)"
    )
    target_modules: tuple[str, ...] = option(
        ("all-linear",), help="layers to adapt: all-linear, name endings, or one regular expression"
    )
    lora_module_name: str | None = classic(
        None, help="adapt the linear layers whose name contains this (DeepSpeed-Chat's rule)"
    )
    train_bias: Literal["none", "all", "lora_only"] = of_adapters(
        "none", help="biases to train: none, all, or those of adapted layers"
    )
    modules_to_save: tuple[str, ...] = option(
        (), help="name endings of modules to train in full and save with the adapter"
    )
    enable_lora: tuple[str, ...] = of_adapters(
        (),
        help="q, k, v: the parts of a packed projection that get factors of their own; the layer "
        "has one pair for all of it when absent",
    )
    expert_lora_dim: int | None = option(
        None,
        help="rank of each expert's update in a mixture of experts; 0 leaves experts frozen; "
        "default: lora_dim over the experts that a token is sent to, at least 1",
    )
    expert_lora_alpha: float | None = option(
        None, help="the update of an expert is scaled by this over its rank; default: lora_alpha"
    )
    only_optimize_lora: bool = of_adapters(
        True, help="freeze the base model when lora_dim > 0 (no-: train it too)"
    )
    # By whole name, modules of another rank or alpha than these: an adapter of PEFT has such.
    ranks: tuple[tuple[str, int], ...] = hidden(())
    alphas: tuple[tuple[str, float], ...] = hidden(())

    def __post_init__(self) -> None:
        require(self.lora_dim >= 0, "lora_dim", self.lora_dim, ">= 0 (0 disables LoRA)")
        require_numbers(self, "> 0", "lora_alpha", "expert_lora_alpha")
        require_numbers(self, ">= 0", "expert_lora_dim")
        require_numbers(self, "in [0, 1)", "lora_dropout")
        require(bool(self.target_modules), "target_modules", (), "one name or more")
        parts = tuple(part for part in "qkv" if part in self.enable_lora)
        fits = sorted(parts) == sorted(self.enable_lora)
        require(fits, "enable_lora", " ".join(self.enable_lora), "some of q, k and v")
        object.__setattr__(self, "enable_lora", parts)

    def described(self) -> str:
        """Rank, scale and parts of the factors, in a few words."""
        if self.lora_dim == 0:
            return "none"
        kind = " rank-stabilised" if self.use_rslora else ""
        biases = f", biases {self.train_bias}" if self.train_bias != "none" else ""
        parts = f", parts {' '.join(self.enable_lora)}" if self.enable_lora else ""
        rank, alpha = self.of_experts().lora_dim, self.of_experts().lora_alpha
        mixed = (rank, alpha) != (self.lora_dim, self.lora_alpha)
        more = f", experts r {rank}, alpha {alpha:g}" if mixed else ""
        modules = {name: self.of_module(name) for name, _ in (*self.ranks, *self.alphas)}
        own = [m for m in modules.values() if (m.lora_dim, m.lora_alpha) != (rank, alpha)]
        others = f", {len(own)} {OWN_SETTINGS}" if own else ""
        return f"r {self.lora_dim}, alpha {self.lora_alpha:g}{kind}{more}{parts}{biases}{others}"

    def of_module(self, name: str) -> "LoraConfig":
        """The settings of one module: its own rank and alpha, where it has them."""
        rank = dict(self.ranks).get(name, self.lora_dim)
        alpha = dict(self.alphas).get(name, self.lora_alpha)
        return replace(self, lora_dim=rank, lora_alpha=alpha)

    def of_experts(self) -> "LoraConfig":
        """The settings of an expert of a mixture, where it has none of its own."""
        rank = self.lora_dim if self.expert_lora_dim is None else self.expert_lora_dim
        alpha = self.lora_alpha if self.expert_lora_alpha is None else self.expert_lora_alpha
        return replace(self, lora_dim=rank, lora_alpha=alpha)


@dataclass(frozen=True)
class BatchConfig:
    section = "training"

    per_device_train_batch_size: int = option(
        16, help="rows per device and micro-batch\nof several samples if packed, else of one"
    )
    tokens_per_device: int = option(
        0, help="tokens per device and micro-batch, instead of a number of rows; 0: by rows"
    )
    per_device_eval_batch_size: int = option(
        16, help="rows per device in evaluation", section=EVALUATION
    )
    gradient_accumulation_steps: int = option(1, help="micro-batches per optimizer step")

    def __post_init__(self) -> None:
        rows = ("per_device_train_batch_size", "per_device_eval_batch_size")
        require_numbers(self, ">= 1", *rows, "gradient_accumulation_steps")
        require_numbers(self, ">= 0", "tokens_per_device")


@dataclass(frozen=True)
class ScheduleConfig:
    """AdamW, the learning-rate schedule and the length of training."""

    section = "training"

    loraplus_lr_ratio: float = of_adapters(
        1.0, help="rate of lora_B over that of lora_A (LoRA+); 1 treats them alike"
    )
    adam_beta1: float = option(0.9, help="decay of the gradient's mean")
    adam_beta2: float = option(0.95, help="decay of the gradient's square")
    adam_epsilon: float = option(1e-8, help="added to the root of the second moment")
    max_grad_norm: float = option(1.0, help="gradients are clipped to this norm; 0: never")
    lr_scheduler_type: Scheduler = option("cosine", help="shape of the rate over the steps")
    num_warmup_steps: int = option(
        0, help="optimizer steps of linear warm-up", when="not lr_scheduler_type=constant"
    )
    num_train_epochs: int = option(
        1,
        help="passes over data; 0 evaluates only",
        hint="--max_steps N ends a run within an epoch",
    )
    max_steps: int = option(
        0, help="optimizer steps to train for, whatever the epochs; 0: by epochs"
    )
    correct_bias: bool = hidden(True)  # of Adam's moments, which start at zero
    decay_after_update: bool = hidden(False)  # AdamW decays before

    def __post_init__(self) -> None:
        require_numbers(self, "> 0", "loraplus_lr_ratio", "adam_epsilon")
        require_numbers(self, "in [0, 1)", "adam_beta1", "adam_beta2")
        lengths = ("num_warmup_steps", "num_train_epochs", "max_steps")
        require_numbers(self, ">= 0", "max_grad_norm", *lengths)


@dataclass(frozen=True)
class OptimConfig(ScheduleConfig):
    """AdamW and its schedule with the rates of the one model that trains."""

    learning_rate: Rate = option(
        5e-5,
        help="peak rate of adapters (unless given 5e-4, DPO 1e-5) or of base weights\nof adapters "
        "where they alone train, but in the scripts of training/; auto: by published rules for "
        "width and stage, that of adapters too",
        when=base_rate_note,
    )
    lora_learning_rate: float | None = of_adapters(
        None,
        help="peak rate of the adapters; default: --learning_rate if given, 5e-4, DPO 1e-5",
        replaces=("lora_lr_multiplier",),
    )
    lora_lr_multiplier: float | None = of_adapters(
        None,
        help="adapters train at this multiple of --learning_rate; measured best: about 10, up to "
        "15 in runs of 100 steps; to be cautious: 2 to 3",
        replaces=("lora_learning_rate",),
    )
    expert_learning_rate: float | None = option(
        None, help="peak rate of experts' adapters in a mixture; default: that of the adapters"
    )
    weight_decay: float = option(0.0, help="decoupled weight decay; biases and norms exempt")
    early_stopping_patience: int = option(
        0,
        help="end the run once this many evaluations in a row had no lower held-out loss than the "
        "lowest before; 0: never",
    )
    default_lora_learning_rate: float | None = hidden(5e-4)  # None: that of base weights
    # of base weights and of adapters, by --learning_rate auto; None until the model is known
    ruled: tuple[float, float] | None = hidden(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(self, "> 0", "learning_rate", "lora_learning_rate", "lora_lr_multiplier")
        require_numbers(self, "> 0", "expert_learning_rate")
        require_numbers(self, ">= 0", "weight_decay", "early_stopping_patience")
        if self.lora_learning_rate is not None and self.lora_lr_multiplier is not None:
            raise ValueError(
                f"--lora_learning_rate {self.lora_learning_rate:g} and --lora_lr_multiplier "
                f"{self.lora_lr_multiplier:g} both set the adapters' rate; give one"
            )


@dataclass(frozen=True)
class ParallelConfig:
    section = PROCESSES

    zero_stage: Literal[0, 1, 2, 3] | None = option(
        None,
        help="ZeRO: 1 shards optimizer state, 2 gradients too, 3 weights too; default: 0\nover "
        "processes; default: what --deepspeed_config says, where it is given",
        replaces=("deepspeed_config",),
    )
    offload: bool = option(
        False,
        help="keep optimizer state (and, at stage 3, weights) in host memory",
        replaces=("deepspeed_config",),
    )
    offload_activations: bool = option(
        False,
        help="keep the inputs of recomputed blocks in pinned host memory until the backward pass "
        "wants them; turns --gradient_checkpointing auto on",
    )
    tensor_parallel_size: int = option(
        1,
        help="processes that hold one model between them, each a part of every layer; they see "
        "the same data",
    )
    sequence_parallel: bool = option(
        False,
        help="with --tensor_parallel_size above 1: between the layers each process keeps its "
        "share of the tokens alone",
        when="tensor_parallel_size>1",
    )
    context_parallel_size: int = option(
        1,
        help="SFT, reward, DPO: processes that divide the tokens of each row among them, for long "
        "rows; attention is exact over the whole of it",
    )
    deepspeed_config: str | None = option(
        None,
        help='DeepSpeed JSON such as configs/ds/zero2.json; "auto" fields are filled in',
        replaces=("zero_stage", "offload"),
    )
    deepspeed: bool = classic(
        False,
        help="accepted from DeepSpeed; it is always used",
        hint="--deepspeed_config FILE takes a JSON file",
    )

    def __post_init__(self) -> None:
        require_numbers(self, ">= 1", "tensor_parallel_size", "context_parallel_size")

    @property
    def processes_per_share(self) -> int:
        """Processes that see the same rows."""
        return self.tensor_parallel_size * self.context_parallel_size

    def shares(self, processes: int) -> int:
        """Number of data-parallel shares of ``processes``."""
        return processes // self.processes_per_share

    def share_words(self, processes: int) -> str:
        """The number of shares as a factor in a message."""
        sizes = {"tensor": self.tensor_parallel_size, "context": self.context_parallel_size}
        over = [f" / --{kind}_parallel_size {n}" for kind, n in sizes.items() if n > 1]
        return f"{processes} processes{''.join(over)}"


@dataclass(frozen=True)
class RunConfig:
    section = "output and checkpoints"

    output_dir: str | None = option(
        None, help="what the run writes; default: the first free of output/STAGE, -2, -3, ..."
    )
    overwrite_output_dir: bool = option(
        False, help="delete what an earlier run left in --output_dir", when="output_dir"
    )
    resume_from_checkpoint: str | None = option(
        None,
        help="go on from a checkpoint: latest, auto (or a fresh start where there is none), or a "
        "path\nlatest and auto take the newest sound one of --output_dir",
        hint="latest goes on from the newest sound checkpoint",
    )
    accept_changed_data: bool = option(
        False,
        help="with --resume_from_checkpoint: go on where the data are not those of the checkpoint, "
        "or cannot be compared with them",
    )
    save_interval: int = option(500, help="optimizer steps between checkpoints; 0: by time only")
    save_minutes: float = option(10.0, help="a checkpoint at least this often; 0: by steps only")
    save_total_limit: int = option(3, help="newest checkpoints that are kept; 0: all")
    seed: int = option(1234, help="seed of initialisation, order and sampling", section="training")
    logging_steps: int = option(1, help="optimizer steps between printed lines", section=LOGGING)
    eval_interval: int = option(
        0,
        help="optimizer steps between evaluations; 0: at the start, each epoch and the end",
        section=EVALUATION,
    )
    eval_iters: int = option(0, help="evaluation batches per device; 0: all", section=EVALUATION)
    sample_generations: int = option(
        2, help="held-out prompts answered before and after training", section=EVALUATION
    )
    merge_adapter: bool = of_adapters(
        False, help="also write base and adapter merged as a transformers model"
    )
    merge_max_kl: float = option(
        0.01,
        help="refuse a merge that moves the distribution by more (nats per token)",
        when="merge_adapter or not only_optimize_lora",
    )
    print_loss: bool = classic(False, help="print the loss at every optimizer step")
    distributed_timeout: float = option(
        120.0,
        help="seconds after which a process that is not heard of ends the run (300 at least until "
        "the first step is over)",
        section=PROCESSES,
    )
    dry_run: bool = option(
        False, help="check everything but the weights, say what the run would do, and stop"
    )
    verbose: bool = option(False, help="with --dry_run: list all options", when="dry_run")

    def __post_init__(self) -> None:
        evaluation = ("eval_interval", "eval_iters", "sample_generations", "merge_max_kl")
        saving = ("save_interval", "save_minutes", "save_total_limit")
        require_numbers(self, ">= 0", *evaluation, *saving)
        require_numbers(self, ">= 1", "logging_steps")
        require_numbers(self, "> 0", "distributed_timeout")
        require(0 <= self.seed < 2**63, "seed", self.seed, "in [0, 2**63)")
        require(self.output_dir != "", "output_dir", "", "a directory; . is the current one")
        if self.output_dir is not None and Path(self.output_dir).is_file():
            raise ValueError(f"--output_dir {self.output_dir} is a file, not a directory")
