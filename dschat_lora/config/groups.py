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
    "16\n0 in the scripts of training/ and with --config; an adapter that is trained further "
    "keeps its rank"
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
        help="compute dtype; auto: bf16 on GPUs that support it, fp16 on older GPUs, fp32 on CPU",
        section=PROCESSES,
    )
    attn_implementation: Literal["auto", "sdpa", "flex_attention", "eager"] = option(
        "auto",
        help="attention implementation; auto: sdpa if the architecture supports it, else eager; "
        "sdpa computes the sequences of a packed row separately if it can; flex_attention is "
        "for GPUs if it cannot",
        section=PROCESSES,
        hint="sdpa uses PyTorch's flash attention if the GPU supports it, also for packed rows",
    )
    trust_remote_code: bool = option(
        False, help="allow running model code from a hub repository", runs="code"
    )
    base_bits: Literal[16, 4] | None = option(
        None,
        help="bits of the frozen base weights: 16, or 4 (QLoRA); default: those the loaded adapter "
        "was trained with, else 16\n4 is NF4, for linear layers and experts of the "
        "transformer blocks",
        section=PROCESSES,
    )
    add_eot_token: bool = option(
        False, help="add --eot_token to the tokenizer and end every completion with it"
    )
    eot_token: str = option(
        "<|endoftext|>", help="end-of-text token that --add_eot_token adds", when="add_eot_token"
    )
    chat_template: str | None = option(
        None,
        help="Jinja file with a chat template instead of the tokenizer's; saved with the model",
    )
    fused_kernels: Literal["auto", "on", "off"] = option(
        "auto",
        help="use fused kernels for RMSNorm, SwiGLU and rotary embeddings if they match the "
        "architecture's own; auto: on a GPU",
        section=PROCESSES,
    )
    compile: bool = option(
        False,
        help="compile the transformer blocks with torch.compile: slower start, faster steps",
        section=PROCESSES,
    )
    training_graphs: Literal["auto", "on", "off"] = option(
        "auto",
        help="replay the forward and backward pass below the head as CUDA graphs; auto: if "
        "launching kernels would take longer than running them\nmicro-batches are padded to a "
        "few shapes; needs ZeRO 0 and no dropout",
        section=PROCESSES,
    )
    compute_fp32_loss: bool = classic(
        True, help="accepted from DeepSpeed-Chat; the loss is always computed in fp32"
    )

    def __post_init__(self) -> None:
        require(self.compute_fp32_loss, "no-compute_fp32_loss", False, "absent: the loss is fp32")
        if self.compile and self.training_graphs == "on":
            why = "--compile changes the operations of the blocks; use auto or off"
            raise ValueError(f"--training_graphs on: {why}")


@dataclass(frozen=True)
class ModelConfig(LoadConfig):
    """The one model of a supervised stage."""

    model_name_or_path: str | None = option(
        None,
        help="hub name, model directory or output of an earlier stage; default: the bundled tiny "
        "model\nor a GGUF file, from the hub as repository:file.gguf",
    )
    gradient_checkpointing: Switch = option(
        "auto",
        help="recompute activations in the backward pass to save memory; auto: if they would not "
        "fit\nwithout a value: on; auto uses an estimate, and on a GPU may split "
        "micro-batches instead if that is faster and their size is not given",
        section=PROCESSES,
    )
    dropout: float = option(
        0.0, help="dropout probability of the base model (all its dropout layers), in [0, 1)"
    )
    router_aux_loss_coef: float = option(
        0.0,
        help="SFT: coefficient of the model's load-balancing loss for MoE experts; 0: not added",
    )
    rope_scaling: str | None = option(
        None,
        help="JSON object that extends rotary position embeddings to longer rows, as in "
        'transformers, such as \'{"rope_type": "yarn", "factor": 4.0}\' (or linear, llama3); '
        "default: that of the loaded adapter's training, else the model's own",
    )
    neftune_noise_alpha: float = option(
        0.0,
        help="SFT: NEFTune noise alpha (5 to 15): add uniform noise of up to alpha / sqrt(L d) to "
        "the embeddings in training, for L tokens of width d; 0: none",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(self, "in [0, 1)", "dropout")
        require_numbers(self, ">= 0", "router_aux_loss_coef", "neftune_noise_alpha")
        parse_rope_scaling(self.rope_scaling)


@dataclass(frozen=True)
class LoraConfig:
    section = "LoRA"

    lora_dim: int = option(0, help="LoRA rank; 0 trains all weights", settled=DEFAULT_RANK)
    lora_alpha: float = of_adapters(
        32.0, help="LoRA alpha: the update is scaled by lora_alpha / lora_dim"
    )
    lora_dropout: float = of_adapters(0.0, help="dropout on the adapter's input, in [0, 1)")
    use_rslora: bool = of_adapters(
        False, help="scale the update by lora_alpha / sqrt(lora_dim) (rank-stabilised LoRA)"
    )
    target_modules: tuple[str, ...] = option(
        ("all-linear",),
        help="layers to adapt: all-linear, name suffixes, or one regular expression",
    )
    lora_module_name: str | None = classic(
        None, help="adapt the linear layers whose name contains this (DeepSpeed-Chat's rule)"
    )
    train_bias: Literal["none", "all", "lora_only"] = of_adapters(
        "none", help="biases to train: none, all, or those of adapted layers (lora_only)"
    )
    modules_to_save: tuple[str, ...] = option(
        (), help="name suffixes of modules to train in full and save with the adapter"
    )
    enable_lora: tuple[str, ...] = of_adapters(
        (),
        help="parts (q, k, v) of a packed projection that get their own lora_A and lora_B; "
        "default: one pair for the whole layer",
    )
    expert_lora_dim: int | None = option(
        None,
        help="LoRA rank of each MoE expert; 0 leaves experts frozen; default: lora_dim divided by "
        "the number of active experts per token, at least 1",
    )
    expert_lora_alpha: float | None = option(
        None, help="LoRA alpha of MoE experts; default: lora_alpha"
    )
    only_optimize_lora: bool = of_adapters(
        True, help="freeze the base model when lora_dim > 0 (no-: also train it)"
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
        require(fits, "enable_lora", " ".join(self.enable_lora), "a subset of q, k and v")
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
        16,
        help="training batch size per device, in rows\nof one micro-batch; a packed row holds "
        "several samples",
    )
    tokens_per_device: int = option(
        0, help="tokens per device and micro-batch, instead of a fixed number of rows; 0: by rows"
    )
    per_device_eval_batch_size: int = option(
        16, help="evaluation batch size per device", section=EVALUATION
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
        1.0, help="LoRA+: ratio of the learning rates of lora_B and lora_A"
    )
    adam_beta1: float = option(0.9, help="beta1 of AdamW")
    adam_beta2: float = option(0.95, help="beta2 of AdamW")
    adam_epsilon: float = option(1e-8, help="epsilon of AdamW")
    max_grad_norm: float = option(1.0, help="maximum gradient norm for clipping; 0: no clipping")
    lr_scheduler_type: Scheduler = option("cosine", help="type of learning-rate schedule")
    num_warmup_steps: int = option(
        0, help="number of optimizer steps of linear warm-up", when="not lr_scheduler_type=constant"
    )
    num_train_epochs: int = option(
        1,
        help="number of training epochs; 0: evaluate only",
        hint="--max_steps N ends a run within an epoch",
    )
    max_steps: int = option(
        0,
        help="number of optimizer steps (of rlhf by default 4 an iteration); 0: by "
        "--num_train_epochs",
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
        help="peak learning rate\nof adapters if only they are trained, except in the scripts of "
        "training/; auto: by published rules for width and stage, for adapters too",
        settled="{default_lora_learning_rate} for adapters, {learning_rate} for base weights",
        when=base_rate_note,
    )
    lora_learning_rate: float | None = of_adapters(
        None,
        help="peak learning rate of the adapters; default: 5e-4 (DPO 1e-5) or, except in the "
        "scripts of training/, --learning_rate if given",
        replaces=("lora_lr_multiplier",),
    )
    lora_lr_multiplier: float | None = of_adapters(
        None,
        help="learning rate of the adapters as a multiple of --learning_rate; best measured: about "
        "10, up to 15 in runs of 100 steps; 2 to 3 is cautious",
        replaces=("lora_learning_rate",),
    )
    expert_learning_rate: float | None = option(
        None,
        help="peak learning rate of the adapters of MoE experts; default: that of the adapters",
    )
    weight_decay: float = option(
        0.0, help="decoupled weight decay, not applied to biases and norms"
    )
    early_stopping_patience: int = option(
        0,
        help="stop after this many consecutive evaluations without a new lowest held-out loss; 0: "
        "never",
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
        help="ZeRO stage: 1 shards optimizer states over processes, 2 also gradients, 3 also "
        "weights; default: 0\nor that of --deepspeed_config",
        replaces=("deepspeed_config",),
    )
    offload: bool = option(
        False,
        help="offload optimizer states (and, at stage 3, weights) to host memory",
        replaces=("deepspeed_config",),
    )
    offload_activations: bool = option(
        False,
        help="offload the checkpointed activations to pinned host memory until the backward pass; "
        "turns --gradient_checkpointing auto on",
    )
    tensor_parallel_size: int = option(
        1,
        help="number of processes over which each layer is split; they process the same data",
    )
    sequence_parallel: bool = option(
        False,
        help="with --tensor_parallel_size above 1: split the activations between layers by tokens",
        when="tensor_parallel_size>1",
    )
    context_parallel_size: int = option(
        1,
        help="SFT, reward, DPO: number of processes over which the tokens of each row are split, "
        "for long rows; attention stays exact over the whole row",
    )
    deepspeed_config: str | None = option(
        None,
        help='DeepSpeed JSON such as configs/ds/zero2.json; "auto" fields are filled in',
        replaces=("zero_stage", "offload"),
    )
    deepspeed: bool = classic(
        False,
        help="accepted from DeepSpeed, which is always used",
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
        None, help="output directory; default: the first free one of output/STAGE, -2, -3, ..."
    )
    overwrite_output_dir: bool = option(
        False, help="overwrite the files of an earlier run in --output_dir", when="output_dir"
    )
    resume_from_checkpoint: str | None = option(
        None,
        help="resume from a checkpoint: latest, auto (a new run if there is none), or a "
        "path\nlatest and auto take the newest valid one in --output_dir",
        hint="latest resumes from the newest valid checkpoint",
    )
    accept_changed_data: bool = option(
        False,
        help="with --resume_from_checkpoint: resume even if the data has changed since the "
        "checkpoint, or cannot be compared",
    )
    save_interval: int = option(500, help="optimizer steps between checkpoints; 0: by time only")
    save_minutes: float = option(10.0, help="maximum minutes between checkpoints; 0: by steps only")
    save_total_limit: int = option(3, help="number of newest checkpoints to keep; 0: all")
    seed: int = option(
        1234, help="random seed of initialisation, data order and sampling", section="training"
    )
    logging_steps: int = option(1, help="optimizer steps between logged lines", section=LOGGING)
    eval_interval: int = option(
        0,
        help="optimizer steps between evaluations, besides those at the start, after each epoch "
        "and at the end\n0: only these; -1: only at the start and the end",
        section=EVALUATION,
    )
    eval_iters: int = option(
        0, help="maximum number of evaluation batches per device; 0: all", section=EVALUATION
    )
    sample_generations: int = option(
        2, help="number of held-out prompts answered before and after training", section=EVALUATION
    )
    merge_adapter: bool = of_adapters(
        False, help="also save the adapter merged into the base, as a transformers model"
    )
    merge_max_kl: float = option(
        0.01,
        help="refuse a merge that changes the output distribution by more than this KL divergence "
        "(nats per token)",
        when="merge_adapter or not only_optimize_lora",
    )
    print_loss: bool = classic(False, help="print the loss at every optimizer step")
    distributed_timeout: float = option(
        120.0,
        help="seconds without a sign of life from a process after which the run ends (at least 300 "
        "until the first step is done)",
        section=PROCESSES,
    )
    dry_run: bool = option(
        False, help="check options and data, print what the run would do, and exit"
    )
    verbose: bool = option(
        False,
        help="print the gradient norm, seconds, TFLOPs and more of each step; with --dry_run: all "
        "options",
        section=LOGGING,
    )

    def __post_init__(self) -> None:
        evaluation = ("eval_iters", "sample_generations", "merge_max_kl")
        saving = ("save_interval", "save_minutes", "save_total_limit")
        require_numbers(self, ">= 0", *evaluation, *saving)
        require(self.eval_interval >= -1, "eval_interval", self.eval_interval, ">= -1")
        require_numbers(self, ">= 1", "logging_steps")
        require_numbers(self, "> 0", "distributed_timeout")
        require(0 <= self.seed < 2**63, "seed", self.seed, "in [0, 2**63)")
        require(self.output_dir != "", "output_dir", "", "a directory; . is the current one")
        if self.output_dir is not None and Path(self.output_dir).is_file():
            raise ValueError(f"--output_dir {self.output_dir} is a file, not a directory")
