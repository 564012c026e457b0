# Types of the public names. scripts/api_stub.py writes this file; a test compares it.

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from dschat_lora.api.options import Data, Model, Reward
from dschat_lora.addons.trainer.trainer import Trainer as _Trainer
from dschat_lora.api.verbs import Message
from dschat_lora.runtime.caller import Callback
from dschat_lora.api.stages import Run as Run
from dschat_lora.api.stages import load as load
from dschat_lora.rl.options.algorithms import Algorithm as Algorithm
from dschat_lora.config.addons import Addon as Addon
from dschat_lora.data.readers import RowError as RowError
from dschat_lora.config.bundled import BUNDLED_DATA as BUNDLED_DATA
from dschat_lora.addons.planning.python import Plan as Plan
from dschat_lora.addons.planning.python import Tuned as Tuned
from dschat_lora.addons.audit.python import Audit as Audit
from dschat_lora.addons.loralib.deepspeed_chat import convert_linear_layer_to_lora as convert_linear_layer_to_lora
from dschat_lora.addons.loralib.deepspeed_chat import convert_lora_to_linear_layer as convert_lora_to_linear_layer
from dschat_lora.addons.loralib.deepspeed_chat import only_optimize_lora_parameters as only_optimize_lora_parameters
from dschat_lora.addons.loralib.deepspeed_chat import make_model_gradient_checkpointing_compatible as make_model_gradient_checkpointing_compatible
from dschat_lora.addons.loralib.deepspeed_chat import get_optimizer_grouped_parameters as get_optimizer_grouped_parameters
from dschat_lora.addons.trainer.sampling import Sample as Sample
__version__: str
__all__: list[str]

def sft(
    model: Model | None = None,
    data: Data | None = None,
    *,
    eval_data: Data | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    callbacks: Sequence[Callback] = (),
    resume: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    max_seq_len: int = 512,
    columns: Sequence[str] | Mapping[str, str] = (),
    packing: bool = True,
    learning_rate: float | Literal['auto'] | None = None,
    num_train_epochs: int = 1,
    max_steps: int = 0,
    per_device_train_batch_size: int = 16,
    gradient_accumulation_steps: int = 1,
    seed: int = 1234,
    num_warmup_steps: int = 0,
    lora_dim: int | None = None,
    lora_alpha: float = 32.0,
    target_modules: str | Sequence[str] = ('all-linear',),
    dry_run: bool = False,
    eval_interval: int = 0,
    report_to: Literal['none', 'tensorboard', 'wandb', 'trackio'] | Sequence[Literal['none', 'tensorboard', 'wandb', 'trackio']] = ('none',),
    base_bits: Literal[16, 4] | None = None,
    zero_stage: Literal[0, 1, 2, 3] | None = None,
    gradient_checkpointing: bool | Literal['auto'] = 'auto',
    deepspeed_config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    loraplus_lr_ratio: float = 1.0,
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.95,
    adam_epsilon: float = 1e-08,
    max_grad_norm: float = 1.0,
    lr_scheduler_type: Literal['linear', 'cosine', 'cosine_with_restarts', 'polynomial', 'constant', 'constant_with_warmup'] = 'cosine',
    lora_learning_rate: float | None = None,
    lora_lr_multiplier: float | None = None,
    expert_learning_rate: float | None = None,
    weight_decay: float = 0.0,
    early_stopping_patience: int = 0,
    offload: bool = False,
    offload_activations: bool = False,
    tensor_parallel_size: int = 1,
    sequence_parallel: bool = False,
    context_parallel_size: int = 1,
    deepspeed: bool = False,
    overwrite_output_dir: bool = False,
    accept_changed_data: bool = False,
    save_interval: int = 500,
    save_minutes: float = 10.0,
    save_total_limit: int = 3,
    logging_steps: int = 1,
    eval_iters: int = 0,
    sample_generations: int = 2,
    merge_adapter: bool = False,
    merge_max_kl: float = 0.01,
    print_loss: bool = False,
    distributed_timeout: float = 120.0,
    verbose: bool = False,
    tokens_per_device: int = 0,
    per_device_eval_batch_size: int = 16,
    dtype: Literal['auto', 'fp32', 'bf16', 'fp16'] = 'auto',
    attn_implementation: Literal['auto', 'sdpa', 'flex_attention', 'eager'] = 'auto',
    trust_remote_code: bool = False,
    add_eot_token: bool = False,
    eot_token: str = '<|endoftext|>',
    chat_template: str | None = None,
    fused_kernels: Literal['auto', 'on', 'off'] = 'auto',
    compile: bool = False,
    training_graphs: Literal['auto', 'on', 'off'] = 'auto',
    compute_fp32_loss: bool = True,
    dropout: float = 0.0,
    router_aux_loss_coef: float = 0.0,
    rope_scaling: str | None = None,
    neftune_noise_alpha: float = 0.0,
    lora_dropout: float = 0.0,
    use_rslora: bool = False,
    lora_module_name: str | None = None,
    train_bias: Literal['none', 'all', 'lora_only'] = 'none',
    modules_to_save: str | Sequence[str] = (),
    enable_lora: str | Sequence[str] = (),
    expert_lora_dim: int | None = None,
    expert_lora_alpha: float | None = None,
    only_optimize_lora: bool = True,
    data_split_name: str | Sequence[str] = (),
    data_weights: float | Sequence[float] = (),
    max_source_rows: int | Sequence[int] = (),
    max_repeats: int | Sequence[int] = (),
    eval_ratio: float = 0.05,
    data_split: str | None = None,
    data_output_path: str | os.PathLike[str] | None = None,
    overlong: Literal['split', 'drop', 'truncate', 'error'] = 'split',
    bad_rows: Literal['stop', 'skip'] = 'stop',
    unpaired_rows: Literal['refuse', 'good_only', 'all'] = 'refuse',
    preprocessing_num_workers: int = 0,
    chat_template_kwargs: str | Mapping[str, Any] | None = None,
    sft_only_data_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    train_on_prompt: bool = False,
    train_empty_think: bool = False,
    eval_tasks: str | Sequence[str] = (),
    eval_tasks_limit: int = 0,
    enable_tensorboard: bool = False,
    tensorboard_path: str | os.PathLike[str] | None = None,
    streaming: bool = False,
    shuffle_buffer_size: int = 10000,
    allow_image_urls: bool = False,
    max_image_pixels: int = 50000000,
    train_vision: bool = False,
    vision_learning_rate: float | None = None,
) -> Run:
    """Fine-tune a language model on rows of text, of answers or of conversations (step 1).

    Args:
        model: hub name, directory, earlier ``Run``, or (model, tokenizer) that are loaded,
            which are not changed; the bundled tiny model when absent.
        data: path or paths, list of dicts or of texts, DataFrame, ``datasets.Dataset``, or another
            iterable of dicts that can be gone through again; the bundled data when absent.
        eval_data: held-out rows, likewise; by default a share of the data (``eval_ratio``).
        output_dir: what the run writes; a temporary directory when absent.
        callbacks: functions ``f(event, step, metrics)``, called on rank 0 with each line of
            metrics.jsonl; one that returns ``"stop"`` ends the run at the next step, with a
            checkpoint and the status "stopped".
        resume: ``"latest"``, ``"auto"`` or a checkpoint to go on from.
        quiet: print nothing.
        **options: those of ``dschat-lora sft --help all``, by their names.

    Returns:
        The run, with its directory, metrics and adapter. Call on every rank of a launch.

    Raises:
        TypeError: for an option that does not exist.
        ValueError: for a value, a file or a row that cannot be used, in the words of the command.
        KeyboardInterrupt: after Ctrl-C, once a checkpoint is saved.

    Everyday options:
        max_seq_len=512: maximum number of tokens per row, prompt and completion together
        columns=(): names of your columns, as in prompt=question completion=answer
        packing=True: pack several samples into rows of --max_seq_len
        learning_rate=None: peak learning rate; default: 0.0005 for adapters, 5e-05 for base weights
        num_train_epochs=1: number of training epochs; 0: evaluate only
        max_steps=0: number of optimizer steps (of rlhf by default 4 an iteration); 0: by --num_train_epochs
        per_device_train_batch_size=16: training batch size per device, in rows
        gradient_accumulation_steps=1: micro-batches per optimizer step
        seed=1234: random seed of initialisation, data order and sampling
        num_warmup_steps=0: number of optimizer steps of linear warm-up
        lora_dim=None: LoRA rank; 0 trains all weights; default: 16
        lora_alpha=32.0: LoRA alpha: the update is scaled by lora_alpha / lora_dim
        target_modules=('all-linear',): layers to adapt: all-linear, name suffixes, or one regular expression
        dry_run=False: check options and data, print what the run would do, and exit
        eval_interval=0: optimizer steps between evaluations, besides those at the start, after each epoch and at the end
        report_to=('none',): trackers to which metrics are also reported
        base_bits=None: bits of the frozen base weights: 16, or 4 (QLoRA); default: those the loaded adapter was trained with, else 16
        zero_stage=None: ZeRO stage: 1 shards optimizer states over processes, 2 also gradients, 3 also weights; default: 0
        gradient_checkpointing='auto': recompute activations in the backward pass to save memory; auto: if they would not fit
        deepspeed_config=None: DeepSpeed JSON such as configs/ds/zero2.json; "auto" fields are filled in

    80 more: `print(dl.sft.options)` lists all, by section, as
    `dschat-lora sft --help all` does in a terminal.
    """

def reward(
    model: Model | None = None,
    data: Data | None = None,
    *,
    eval_data: Data | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    callbacks: Sequence[Callback] = (),
    resume: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    max_seq_len: int = 512,
    columns: Sequence[str] | Mapping[str, str] = (),
    packing: bool = False,
    learning_rate: float | Literal['auto'] | None = None,
    num_train_epochs: int = 1,
    max_steps: int = 0,
    per_device_train_batch_size: int = 16,
    gradient_accumulation_steps: int = 1,
    seed: int = 1234,
    num_warmup_steps: int = 0,
    lora_dim: int | None = None,
    lora_alpha: float = 32.0,
    target_modules: str | Sequence[str] = ('all-linear',),
    reward_loss: Literal['bradley_terry', 'per_token'] = 'bradley_terry',
    dry_run: bool = False,
    eval_interval: int = 0,
    report_to: Literal['none', 'tensorboard', 'wandb', 'trackio'] | Sequence[Literal['none', 'tensorboard', 'wandb', 'trackio']] = ('none',),
    base_bits: Literal[16, 4] | None = None,
    zero_stage: Literal[0, 1, 2, 3] | None = None,
    gradient_checkpointing: bool | Literal['auto'] = 'auto',
    loraplus_lr_ratio: float = 1.0,
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.95,
    adam_epsilon: float = 1e-08,
    max_grad_norm: float = 1.0,
    lr_scheduler_type: Literal['linear', 'cosine', 'cosine_with_restarts', 'polynomial', 'constant', 'constant_with_warmup'] = 'cosine',
    lora_learning_rate: float | None = None,
    lora_lr_multiplier: float | None = None,
    expert_learning_rate: float | None = None,
    weight_decay: float = 0.0,
    early_stopping_patience: int = 0,
    offload: bool = False,
    offload_activations: bool = False,
    tensor_parallel_size: int = 1,
    sequence_parallel: bool = False,
    context_parallel_size: int = 1,
    deepspeed_config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    deepspeed: bool = False,
    overwrite_output_dir: bool = False,
    accept_changed_data: bool = False,
    save_interval: int = 500,
    save_minutes: float = 10.0,
    save_total_limit: int = 3,
    logging_steps: int = 1,
    eval_iters: int = 0,
    sample_generations: int = 2,
    merge_adapter: bool = False,
    merge_max_kl: float = 0.01,
    print_loss: bool = False,
    distributed_timeout: float = 120.0,
    verbose: bool = False,
    tokens_per_device: int = 0,
    per_device_eval_batch_size: int = 16,
    dtype: Literal['auto', 'fp32', 'bf16', 'fp16'] = 'auto',
    attn_implementation: Literal['auto', 'sdpa', 'flex_attention', 'eager'] = 'auto',
    trust_remote_code: bool = False,
    add_eot_token: bool = False,
    eot_token: str = '<|endoftext|>',
    chat_template: str | None = None,
    fused_kernels: Literal['auto', 'on', 'off'] = 'auto',
    compile: bool = False,
    training_graphs: Literal['auto', 'on', 'off'] = 'auto',
    compute_fp32_loss: bool = True,
    dropout: float = 0.0,
    router_aux_loss_coef: float = 0.0,
    rope_scaling: str | None = None,
    neftune_noise_alpha: float = 0.0,
    lora_dropout: float = 0.0,
    use_rslora: bool = False,
    lora_module_name: str | None = None,
    train_bias: Literal['none', 'all', 'lora_only'] = 'none',
    modules_to_save: str | Sequence[str] = (),
    enable_lora: str | Sequence[str] = (),
    expert_lora_dim: int | None = None,
    expert_lora_alpha: float | None = None,
    only_optimize_lora: bool = True,
    data_split_name: str | Sequence[str] = (),
    data_weights: float | Sequence[float] = (),
    max_source_rows: int | Sequence[int] = (),
    max_repeats: int | Sequence[int] = (),
    eval_ratio: float = 0.05,
    data_split: str | None = None,
    data_output_path: str | os.PathLike[str] | None = None,
    overlong: Literal['split', 'drop', 'truncate', 'error'] = 'split',
    bad_rows: Literal['stop', 'skip'] = 'stop',
    unpaired_rows: Literal['refuse', 'good_only', 'all'] = 'refuse',
    preprocessing_num_workers: int = 0,
    chat_template_kwargs: str | Mapping[str, Any] | None = None,
    sft_only_data_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    train_on_prompt: bool = False,
    train_empty_think: bool = False,
    eval_tasks: str | Sequence[str] = (),
    eval_tasks_limit: int = 0,
    enable_tensorboard: bool = False,
    tensorboard_path: str | os.PathLike[str] | None = None,
    streaming: bool = False,
    shuffle_buffer_size: int = 10000,
    allow_image_urls: bool = False,
    max_image_pixels: int = 50000000,
    train_vision: bool = False,
    vision_learning_rate: float | None = None,
    num_padding_at_beginning: int = 1,
    share_prompt: bool = True,
    center_rewards_coefficient: float = 0.0,
) -> Run:
    """Train a reward model on pairs of answers (step 2); arguments as those of ``sft``.

    Everyday options:
        max_seq_len=512: maximum number of tokens per row, prompt and completion together
        columns=(): names of your columns, as in prompt=question completion=answer
        packing=False: pack several samples into rows of --max_seq_len
        learning_rate=None: peak learning rate; default: 0.0005 for adapters, 5e-05 for base weights
        num_train_epochs=1: number of training epochs; 0: evaluate only
        max_steps=0: number of optimizer steps (of rlhf by default 4 an iteration); 0: by --num_train_epochs
        per_device_train_batch_size=16: training batch size per device, in rows
        gradient_accumulation_steps=1: micro-batches per optimizer step
        seed=1234: random seed of initialisation, data order and sampling
        num_warmup_steps=0: number of optimizer steps of linear warm-up
        lora_dim=None: LoRA rank; 0 trains all weights; default: 16
        lora_alpha=32.0: LoRA alpha: the update is scaled by lora_alpha / lora_dim
        target_modules=('all-linear',): layers to adapt: all-linear, name suffixes, or one regular expression
        reward_loss='bradley_terry': loss of the reward model; bradley_terry compares the scores at the ends of the two answers; per_token is DeepSpeed-Chat's loss
        dry_run=False: check options and data, print what the run would do, and exit
        eval_interval=0: optimizer steps between evaluations, besides those at the start, after each epoch and at the end
        report_to=('none',): trackers to which metrics are also reported
        base_bits=None: bits of the frozen base weights: 16, or 4 (QLoRA); default: those the loaded adapter was trained with, else 16
        zero_stage=None: ZeRO stage: 1 shards optimizer states over processes, 2 also gradients, 3 also weights; default: 0
        gradient_checkpointing='auto': recompute activations in the backward pass to save memory; auto: if they would not fit

    84 more: `print(dl.reward.options)` lists all, by section, as
    `dschat-lora reward --help all` does in a terminal.
    """

def dpo(
    model: Model | None = None,
    data: Data | None = None,
    *,
    eval_data: Data | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    callbacks: Sequence[Callback] = (),
    resume: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    max_seq_len: int = 512,
    columns: Sequence[str] | Mapping[str, str] = (),
    packing: bool = False,
    learning_rate: float | Literal['auto'] | None = None,
    num_train_epochs: int = 1,
    max_steps: int = 0,
    per_device_train_batch_size: int = 16,
    gradient_accumulation_steps: int = 1,
    seed: int = 1234,
    lora_dim: int | None = None,
    lora_alpha: float = 32.0,
    target_modules: str | Sequence[str] = ('all-linear',),
    loss_type: Literal['sigmoid', 'ipo', 'hinge', 'orpo', 'simpo', 'kto'] = 'sigmoid',
    beta: float = 0.1,
    dry_run: bool = False,
    eval_interval: int = 0,
    report_to: Literal['none', 'tensorboard', 'wandb', 'trackio'] | Sequence[Literal['none', 'tensorboard', 'wandb', 'trackio']] = ('none',),
    base_bits: Literal[16, 4] | None = None,
    zero_stage: Literal[0, 1, 2, 3] | None = None,
    gradient_checkpointing: bool | Literal['auto'] = 'auto',
    loraplus_lr_ratio: float = 1.0,
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.95,
    adam_epsilon: float = 1e-08,
    max_grad_norm: float = 1.0,
    lr_scheduler_type: Literal['linear', 'cosine', 'cosine_with_restarts', 'polynomial', 'constant', 'constant_with_warmup'] = 'cosine',
    num_warmup_steps: int = 0,
    lora_learning_rate: float | None = None,
    lora_lr_multiplier: float | None = None,
    expert_learning_rate: float | None = None,
    weight_decay: float = 0.0,
    early_stopping_patience: int = 0,
    offload: bool = False,
    offload_activations: bool = False,
    tensor_parallel_size: int = 1,
    sequence_parallel: bool = False,
    context_parallel_size: int = 1,
    deepspeed_config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    deepspeed: bool = False,
    overwrite_output_dir: bool = False,
    accept_changed_data: bool = False,
    save_interval: int = 500,
    save_minutes: float = 10.0,
    save_total_limit: int = 3,
    logging_steps: int = 1,
    eval_iters: int = 0,
    sample_generations: int = 2,
    merge_adapter: bool = False,
    merge_max_kl: float = 0.01,
    print_loss: bool = False,
    distributed_timeout: float = 120.0,
    verbose: bool = False,
    tokens_per_device: int = 0,
    per_device_eval_batch_size: int = 16,
    dtype: Literal['auto', 'fp32', 'bf16', 'fp16'] = 'auto',
    attn_implementation: Literal['auto', 'sdpa', 'flex_attention', 'eager'] = 'auto',
    trust_remote_code: bool = False,
    add_eot_token: bool = False,
    eot_token: str = '<|endoftext|>',
    chat_template: str | None = None,
    fused_kernels: Literal['auto', 'on', 'off'] = 'auto',
    compile: bool = False,
    training_graphs: Literal['auto', 'on', 'off'] = 'auto',
    compute_fp32_loss: bool = True,
    dropout: float = 0.0,
    router_aux_loss_coef: float = 0.0,
    rope_scaling: str | None = None,
    neftune_noise_alpha: float = 0.0,
    lora_dropout: float = 0.0,
    use_rslora: bool = False,
    lora_module_name: str | None = None,
    train_bias: Literal['none', 'all', 'lora_only'] = 'none',
    modules_to_save: str | Sequence[str] = (),
    enable_lora: str | Sequence[str] = (),
    expert_lora_dim: int | None = None,
    expert_lora_alpha: float | None = None,
    only_optimize_lora: bool = True,
    data_split_name: str | Sequence[str] = (),
    data_weights: float | Sequence[float] = (),
    max_source_rows: int | Sequence[int] = (),
    max_repeats: int | Sequence[int] = (),
    eval_ratio: float = 0.05,
    data_split: str | None = None,
    data_output_path: str | os.PathLike[str] | None = None,
    overlong: Literal['split', 'drop', 'truncate', 'error'] = 'split',
    bad_rows: Literal['stop', 'skip'] = 'stop',
    unpaired_rows: Literal['refuse', 'good_only', 'all'] = 'refuse',
    preprocessing_num_workers: int = 0,
    chat_template_kwargs: str | Mapping[str, Any] | None = None,
    sft_only_data_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    train_on_prompt: bool = False,
    train_empty_think: bool = False,
    eval_tasks: str | Sequence[str] = (),
    eval_tasks_limit: int = 0,
    enable_tensorboard: bool = False,
    tensorboard_path: str | os.PathLike[str] | None = None,
    streaming: bool = False,
    shuffle_buffer_size: int = 10000,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    allow_image_urls: bool = False,
    max_image_pixels: int = 50000000,
    train_vision: bool = False,
    vision_learning_rate: float | None = None,
    num_padding_at_beginning: int = 1,
    share_prompt: bool = True,
    label_smoothing: float = 0.0,
    simpo_gamma: float = 0.5,
    length_normalization: bool = False,
    rpo_alpha: float = 0.0,
    precompute_ref_log_probs: bool = True,
    offload_reference_model: bool = False,
) -> Run:
    """Train a policy by DPO, ORPO, SimPO or KTO; arguments as those of ``sft``.

    Everyday options:
        max_seq_len=512: maximum number of tokens per row, prompt and completion together
        columns=(): names of your columns, as in prompt=question completion=answer
        packing=False: pack several samples into rows of --max_seq_len
        learning_rate=None: peak learning rate; default: 1e-05 for adapters, 1e-06 for base weights
        num_train_epochs=1: number of training epochs; 0: evaluate only
        max_steps=0: number of optimizer steps (of rlhf by default 4 an iteration); 0: by --num_train_epochs
        per_device_train_batch_size=16: training batch size per device, in rows
        gradient_accumulation_steps=1: micro-batches per optimizer step
        seed=1234: random seed of initialisation, data order and sampling
        lora_dim=None: LoRA rank; 0 trains all weights; default: 16
        lora_alpha=32.0: LoRA alpha: the update is scaled by lora_alpha / lora_dim
        target_modules=('all-linear',): layers to adapt: all-linear, name suffixes, or one regular expression
        loss_type='sigmoid': loss of pairs, where sigmoid is DPO's original, or of single answers: kto
        beta=0.1: strength of the KL constraint to the reference; a larger beta keeps the policy closer
        dry_run=False: check options and data, print what the run would do, and exit
        eval_interval=0: optimizer steps between evaluations, besides those at the start, after each epoch and at the end
        report_to=('none',): trackers to which metrics are also reported
        base_bits=None: bits of the frozen base weights: 16, or 4 (QLoRA); default: those the loaded adapter was trained with, else 16
        zero_stage=None: ZeRO stage: 1 shards optimizer states over processes, 2 also gradients, 3 also weights; default: 0
        gradient_checkpointing='auto': recompute activations in the backward pass to save memory; auto: if they would not fit

    92 more: `print(dl.dpo.options)` lists all, by section, as
    `dschat-lora dpo --help all` does in a terminal.
    """

def rlhf(
    model: Model | None = None,
    data: Data | None = None,
    *,
    rewards: Reward | Sequence[Reward] = (),
    critic: Model | None = None,
    eval_data: Data | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    callbacks: Sequence[Callback] = (),
    resume: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    actor_lora_dim: int | None = None,
    actor_learning_rate: float | Literal['auto'] | None = None,
    max_prompt_seq_len: int = 256,
    max_answer_seq_len: int = 256,
    columns: Sequence[str] | Mapping[str, str] = (),
    per_device_training_batch_size: int = 16,
    num_train_epochs: int = 1,
    max_steps: int = 0,
    gradient_accumulation_steps: int = 1,
    num_generations: int | None = None,
    per_device_generation_batch_size: int = 16,
    generation_batches: int = 1,
    rollout_engine: Literal['own', 'vllm'] | str | object = 'own',
    algorithm: Literal['ppo', 'rloo', 'grpo', 'reinforce_pp', 'reinforce_pp_baseline', 'dr_grpo', 'dapo', 'gspo', 'cispo', 'gdpo', 'sapo', 'distill'] | str | Callable[..., Any] | Algorithm = 'ppo',
    kl_coef: float | None = None,
    dry_run: bool = False,
    eval_interval: int = 0,
    report_to: Literal['none', 'tensorboard', 'wandb', 'trackio'] | Sequence[Literal['none', 'tensorboard', 'wandb', 'trackio']] = ('none',),
    base_bits: Literal[16, 4] | None = None,
    zero_stage: Literal[0, 1, 2, 3] | None = None,
    loraplus_lr_ratio: float = 1.0,
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.95,
    adam_epsilon: float = 1e-08,
    max_grad_norm: float = 1.0,
    lr_scheduler_type: Literal['linear', 'cosine', 'cosine_with_restarts', 'polynomial', 'constant', 'constant_with_warmup'] = 'cosine',
    num_warmup_steps: int = 0,
    offload: bool = False,
    offload_activations: bool = False,
    tensor_parallel_size: int = 1,
    sequence_parallel: bool = False,
    context_parallel_size: int = 1,
    deepspeed_config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    deepspeed: bool = False,
    overwrite_output_dir: bool = False,
    accept_changed_data: bool = False,
    save_interval: int = 500,
    save_minutes: float = 10.0,
    save_total_limit: int = 3,
    seed: int = 1234,
    logging_steps: int = 1,
    eval_iters: int = 0,
    sample_generations: int = 2,
    merge_adapter: bool = False,
    merge_max_kl: float = 0.01,
    print_loss: bool = False,
    distributed_timeout: float = 120.0,
    verbose: bool = False,
    max_num_seqs: int | Literal['auto'] = 'auto',
    tokens_per_device: int = 0,
    merge_for_rollouts: bool = False,
    refill_share: float | None = None,
    do_sample: bool = True,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop_tokens: str | Sequence[str] = (),
    stop_strings: str | Sequence[str] = (),
    actor_lora_alpha: float = 32.0,
    actor_use_rslora: bool = False,
    actor_expert_lora_dim: int | None = None,
    actor_expert_lora_alpha: float | None = None,
    actor_target_modules: str | Sequence[str] = ('all-linear',),
    actor_lora_module_name: str | None = None,
    actor_lora_learning_rate: float = 0.0005,
    actor_expert_learning_rate: float | None = None,
    actor_weight_decay: float = 0.0,
    actor_zero_stage: Literal[0, 1, 2, 3] | None = None,
    actor_gradient_checkpointing: bool | Literal['auto'] = 'auto',
    actor_dropout: float = 0.0,
    critic_lora_dim: int | None = None,
    critic_lora_alpha: float = 32.0,
    critic_use_rslora: bool = False,
    critic_expert_lora_dim: int | None = None,
    critic_expert_lora_alpha: float | None = None,
    critic_target_modules: str | Sequence[str] = ('all-linear',),
    critic_lora_module_name: str | None = None,
    critic_learning_rate: float | Literal['auto'] | None = None,
    critic_lora_learning_rate: float = 0.0005,
    critic_expert_learning_rate: float | None = None,
    critic_weight_decay: float = 0.0,
    critic_zero_stage: Literal[0, 1, 2, 3] | None = None,
    critic_gradient_checkpointing: bool | Literal['auto'] = 'auto',
    critic_dropout: float = 0.0,
    dtype: Literal['auto', 'fp32', 'bf16', 'fp16'] = 'auto',
    attn_implementation: Literal['auto', 'sdpa', 'flex_attention', 'eager'] = 'auto',
    trust_remote_code: bool = False,
    add_eot_token: bool = False,
    eot_token: str = '<|endoftext|>',
    chat_template: str | None = None,
    fused_kernels: Literal['auto', 'on', 'off'] = 'auto',
    compile: bool = False,
    training_graphs: Literal['auto', 'on', 'off'] = 'auto',
    compute_fp32_loss: bool = True,
    data_split_name: str | Sequence[str] = (),
    data_weights: float | Sequence[float] = (),
    max_source_rows: int | Sequence[int] = (),
    max_repeats: int | Sequence[int] = (),
    eval_ratio: float = 0.05,
    data_split: str | None = None,
    data_output_path: str | os.PathLike[str] | None = None,
    overlong: Literal['split', 'drop', 'truncate', 'error'] = 'split',
    bad_rows: Literal['stop', 'skip'] = 'stop',
    unpaired_rows: Literal['refuse', 'good_only', 'all'] = 'refuse',
    preprocessing_num_workers: int = 0,
    chat_template_kwargs: str | Mapping[str, Any] | None = None,
    reward_weights: float | Sequence[float] = (),
    reward_batch: Literal['all', 'group'] = 'all',
    reward_retries: int = 0,
    reward_timeout: float = 0.0,
    clip_reward_value: float = 5.0,
    reward_scaling: Literal['none', 'running', 'initial'] = 'initial',
    judge_function: str | object | None = None,
    missing_eos_penalty: float = 0.0,
    soft_overlong_tokens: int = 0,
    ppo_epochs: int = 1,
    kl_estimator: Literal['k1', 'k2', 'k3'] | None = None,
    kl_in: Literal['reward', 'loss'] | None = None,
    adaptive_kl_target: float = 0.0,
    kl_horizon: int = 10000,
    gamma: float = 1.0,
    lam: float = 1.0,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    dual_clip: float = 0.0,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    loss_normalization: Literal['token', 'sequence', 'constant'] | None = None,
    mask_truncated_completions: bool | None = None,
    dynamic_sampling: int | None = None,
    cliprange_value: float = 0.2,
    whiten_advantages: bool = True,
    critic_warmup_iterations: int = 0,
    importance_cap: float = 0.0,
    rollout_correction: Literal['none', 'tis', 'mis'] | None = None,
    rollout_is: Literal['token', 'sequence'] = 'token',
    rollout_is_threshold: float = 2.0,
    rollout_is_threshold_lower: float = 0.0,
    use_rollout_logprobs: bool = False,
    entropy_coef: float = 0.0,
    target_kl: float = 0.0,
    unsupervised_dataset_name: str | None = None,
    unsupervised_dataset_config_name: str | None = None,
    unsup_coef: float = 27.8,
    only_optimize_lora: bool = True,
    enable_ema: bool = False,
    ema_decay: float = 0.992,
    log_rollouts: int = 128,
    print_answers: bool = False,
    print_answers_interval: int = 10,
    enable_test_mode: bool = False,
    test_stop_step: int = 0,
    num_padding_at_beginning: int = 1,
    align_overflow: bool = False,
    offload_reference_model: bool = False,
    offload_reward_model: bool = False,
    enable_hybrid_engine: bool = False,
    unpin_actor_parameters: bool = False,
    release_inference_cache: bool = False,
    inference_tp_size: int = 1,
    tp_gather_partition_size: int = 8,
    enable_mixed_precision_lora: bool = False,
    eval_prompts: int = 64,
    enable_tensorboard: bool = False,
    tensorboard_path: str | os.PathLike[str] | None = None,
    streaming: bool = False,
    shuffle_buffer_size: int = 10000,
    allow_image_urls: bool = False,
    max_image_pixels: int = 50000000,
    train_vision: bool = False,
    vision_learning_rate: float | None = None,
    num_prompts: int = 0,
    environment: str | object | None = None,
    max_turns: int = 8,
    vllm_command: str | None = None,
    vllm_gpu_memory_utilization: float = 0.3,
    rollout_adapter_dir: str | os.PathLike[str] | None = None,
    rollout_timeout: float = 600.0,
    rollouts_ahead: int = 0,
    agent: str | object | None = None,
    agent_command: str | None = None,
    agent_timeout: float = 600.0,
    agent_retries: int = 0,
    agent_max_calls: int = 100,
    teacher_model_name_or_path: str | os.PathLike[str] | None = None,
    teacher_bits: Literal[16, 4] | None = None,
    teacher_system_prompt: str | None = None,
    distill_loss: Literal['reverse_kl', 'forward_kl', 'jsd', 'sampled_reverse_kl'] = 'reverse_kl',
    jsd_beta: float = 0.5,
    distill_top_k: int = 0,
    on_policy_share: float = 1.0,
    parts: Any | Sequence[Any] = (),
    guard: Literal['warn', 'stop', 'off'] = 'warn',
    kl_budget: float = 0.0,
) -> Run:
    """Train a policy on its own responses by PPO, RLOO or GRPO (step 3).

    The other arguments are those of ``sft``; ``model`` is the actor, ``data`` its prompts.

    Args:
        model: the actor, as in ``sft``.
        data: rows with prompts.
        rewards: what scores responses, one or several: functions that take ``responses`` (or
            ``completions``), ``prompts`` and columns of the data, runs of ``reward``, paths of
            reward models, names such as ``"builtin:length=12"``, or objects with ``names`` that
            give a reward by each of them. With ``reward_weights`` each has a weight.
        critic: reward model from which the critic starts, and which scores too; by default the
            first reward model of ``rewards``, if any.
        eval_data: held-out prompts.
        output_dir: as in ``sft``.
        callbacks: as in ``sft``.
        resume: as in ``sft``.
        quiet: print nothing.
        **options: those of ``dschat-lora rlhf --help all``, by their names.

    Everyday options:
        actor_lora_dim=None: LoRA rank of a new adapter; 0 trains all weights; default: 16
        actor_learning_rate=None: peak learning rate; default: 0.0005 for the adapter, 9.65e-06 for base weights
        max_prompt_seq_len=256: maximum number of tokens of a prompt; --overlong applies to longer ones
        max_answer_seq_len=256: maximum number of tokens of a response
        columns=(): names of your columns, as in prompt=question completion=answer
        per_device_training_batch_size=16: training batch size per device, in responses of one micro-batch
        num_train_epochs=1: number of training epochs; 0: evaluate only
        max_steps=0: number of optimizer steps (of rlhf by default 4 an iteration); 0: by --num_train_epochs
        gradient_accumulation_steps=1: micro-batches per optimizer step
        num_generations=None: responses per prompt (8, or 1 if they are not compared); default: by --algorithm
        per_device_generation_batch_size=16: generation batch size per device, in responses
        generation_batches=1: generation batches per iteration
        rollout_engine='own': engine that generates responses: own, vllm, servers or module:Class
        algorithm='ppo': reinforcement-learning algorithm
        kl_coef=None: coefficient of the KL divergence from the reference (0.1 or 0); default: by --algorithm
        dry_run=False: check options and data, print what the run would do, and exit
        eval_interval=0: optimizer steps between evaluations, besides those at the start, after each epoch and at the end
        report_to=('none',): trackers to which metrics are also reported
        base_bits=None: bits of the frozen base weights: 16, or 4 (QLoRA); default: those the loaded adapter was trained with, else 16
        zero_stage=None: ZeRO stage: 1 shards optimizer states over processes, 2 also gradients, 3 also weights; default: 0

    175 more: `print(dl.rlhf.options)` lists all, by section, as
    `dschat-lora rlhf --help all` does in a terminal.
    """

def distill(
    model: Model | None = None,
    data: Data | None = None,
    *,
    teacher: Model | None = None,
    rewards: Reward | Sequence[Reward] = (),
    eval_data: Data | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    callbacks: Sequence[Callback] = (),
    resume: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    actor_lora_dim: int | None = None,
    actor_learning_rate: float | Literal['auto'] | None = None,
    max_prompt_seq_len: int = 256,
    max_answer_seq_len: int = 256,
    per_device_training_batch_size: int = 16,
    num_train_epochs: int = 1,
    max_steps: int = 0,
    gradient_accumulation_steps: int = 1,
    per_device_generation_batch_size: int = 16,
    generation_batches: int = 1,
    temperature: float = 1.0,
    rollout_engine: Literal['own', 'vllm'] | str | object = 'own',
    dry_run: bool = False,
    eval_interval: int = 0,
    report_to: Literal['none', 'tensorboard', 'wandb', 'trackio'] | Sequence[Literal['none', 'tensorboard', 'wandb', 'trackio']] = ('none',),
    base_bits: Literal[16, 4] | None = None,
    zero_stage: Literal[0, 1, 2, 3] | None = None,
    distill_loss: Literal['reverse_kl', 'forward_kl', 'jsd', 'sampled_reverse_kl'] = 'reverse_kl',
    teacher_system_prompt: str | None = None,
    on_policy_share: float = 1.0,
    loraplus_lr_ratio: float = 1.0,
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.95,
    adam_epsilon: float = 1e-08,
    max_grad_norm: float = 1.0,
    lr_scheduler_type: Literal['linear', 'cosine', 'cosine_with_restarts', 'polynomial', 'constant', 'constant_with_warmup'] = 'cosine',
    num_warmup_steps: int = 0,
    offload: bool = False,
    offload_activations: bool = False,
    tensor_parallel_size: int = 1,
    sequence_parallel: bool = False,
    context_parallel_size: int = 1,
    deepspeed_config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    deepspeed: bool = False,
    overwrite_output_dir: bool = False,
    accept_changed_data: bool = False,
    save_interval: int = 500,
    save_minutes: float = 10.0,
    save_total_limit: int = 3,
    seed: int = 1234,
    logging_steps: int = 1,
    eval_iters: int = 0,
    sample_generations: int = 2,
    merge_adapter: bool = False,
    merge_max_kl: float = 0.01,
    print_loss: bool = False,
    distributed_timeout: float = 120.0,
    verbose: bool = False,
    max_num_seqs: int | Literal['auto'] = 'auto',
    tokens_per_device: int = 0,
    num_generations: int | None = None,
    merge_for_rollouts: bool = False,
    refill_share: float | None = None,
    do_sample: bool = True,
    top_p: float = 1.0,
    top_k: int = 0,
    stop_tokens: str | Sequence[str] = (),
    stop_strings: str | Sequence[str] = (),
    actor_lora_alpha: float = 32.0,
    actor_use_rslora: bool = False,
    actor_expert_lora_dim: int | None = None,
    actor_expert_lora_alpha: float | None = None,
    actor_target_modules: str | Sequence[str] = ('all-linear',),
    actor_lora_module_name: str | None = None,
    actor_lora_learning_rate: float = 0.0005,
    actor_expert_learning_rate: float | None = None,
    actor_weight_decay: float = 0.0,
    actor_zero_stage: Literal[0, 1, 2, 3] | None = None,
    actor_gradient_checkpointing: bool | Literal['auto'] = 'auto',
    actor_dropout: float = 0.0,
    critic_lora_dim: int | None = None,
    critic_lora_alpha: float = 32.0,
    critic_use_rslora: bool = False,
    critic_expert_lora_dim: int | None = None,
    critic_expert_lora_alpha: float | None = None,
    critic_target_modules: str | Sequence[str] = ('all-linear',),
    critic_lora_module_name: str | None = None,
    critic_learning_rate: float | Literal['auto'] | None = None,
    critic_lora_learning_rate: float = 0.0005,
    critic_expert_learning_rate: float | None = None,
    critic_weight_decay: float = 0.0,
    critic_zero_stage: Literal[0, 1, 2, 3] | None = None,
    critic_gradient_checkpointing: bool | Literal['auto'] = 'auto',
    critic_dropout: float = 0.0,
    dtype: Literal['auto', 'fp32', 'bf16', 'fp16'] = 'auto',
    attn_implementation: Literal['auto', 'sdpa', 'flex_attention', 'eager'] = 'auto',
    trust_remote_code: bool = False,
    add_eot_token: bool = False,
    eot_token: str = '<|endoftext|>',
    chat_template: str | None = None,
    fused_kernels: Literal['auto', 'on', 'off'] = 'auto',
    compile: bool = False,
    training_graphs: Literal['auto', 'on', 'off'] = 'auto',
    compute_fp32_loss: bool = True,
    data_split_name: str | Sequence[str] = (),
    columns: Sequence[str] | Mapping[str, str] = (),
    data_weights: float | Sequence[float] = (),
    max_source_rows: int | Sequence[int] = (),
    max_repeats: int | Sequence[int] = (),
    eval_ratio: float = 0.05,
    data_split: str | None = None,
    data_output_path: str | os.PathLike[str] | None = None,
    overlong: Literal['split', 'drop', 'truncate', 'error'] = 'split',
    bad_rows: Literal['stop', 'skip'] = 'stop',
    unpaired_rows: Literal['refuse', 'good_only', 'all'] = 'refuse',
    preprocessing_num_workers: int = 0,
    chat_template_kwargs: str | Mapping[str, Any] | None = None,
    reward_weights: float | Sequence[float] = (),
    reward_batch: Literal['all', 'group'] = 'all',
    reward_retries: int = 0,
    reward_timeout: float = 0.0,
    clip_reward_value: float = 5.0,
    reward_scaling: Literal['none', 'running', 'initial'] = 'initial',
    judge_function: str | object | None = None,
    missing_eos_penalty: float = 0.0,
    soft_overlong_tokens: int = 0,
    ppo_epochs: int = 1,
    kl_coef: float | None = None,
    kl_estimator: Literal['k1', 'k2', 'k3'] | None = None,
    kl_in: Literal['reward', 'loss'] | None = None,
    adaptive_kl_target: float = 0.0,
    kl_horizon: int = 10000,
    gamma: float = 1.0,
    lam: float = 1.0,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    dual_clip: float = 0.0,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    loss_normalization: Literal['token', 'sequence', 'constant'] | None = None,
    mask_truncated_completions: bool | None = None,
    dynamic_sampling: int | None = None,
    cliprange_value: float = 0.2,
    whiten_advantages: bool = True,
    critic_warmup_iterations: int = 0,
    importance_cap: float = 0.0,
    rollout_correction: Literal['none', 'tis', 'mis'] | None = None,
    rollout_is: Literal['token', 'sequence'] = 'token',
    rollout_is_threshold: float = 2.0,
    rollout_is_threshold_lower: float = 0.0,
    use_rollout_logprobs: bool = False,
    entropy_coef: float = 0.0,
    target_kl: float = 0.0,
    unsupervised_dataset_name: str | None = None,
    unsupervised_dataset_config_name: str | None = None,
    unsup_coef: float = 27.8,
    only_optimize_lora: bool = True,
    enable_ema: bool = False,
    ema_decay: float = 0.992,
    log_rollouts: int = 128,
    print_answers: bool = False,
    print_answers_interval: int = 10,
    enable_test_mode: bool = False,
    test_stop_step: int = 0,
    num_padding_at_beginning: int = 1,
    align_overflow: bool = False,
    offload_reference_model: bool = False,
    offload_reward_model: bool = False,
    enable_hybrid_engine: bool = False,
    unpin_actor_parameters: bool = False,
    release_inference_cache: bool = False,
    inference_tp_size: int = 1,
    tp_gather_partition_size: int = 8,
    enable_mixed_precision_lora: bool = False,
    eval_prompts: int = 64,
    enable_tensorboard: bool = False,
    tensorboard_path: str | os.PathLike[str] | None = None,
    streaming: bool = False,
    shuffle_buffer_size: int = 10000,
    num_prompts: int = 0,
    environment: str | object | None = None,
    max_turns: int = 8,
    vllm_command: str | None = None,
    vllm_gpu_memory_utilization: float = 0.3,
    rollout_adapter_dir: str | os.PathLike[str] | None = None,
    rollout_timeout: float = 600.0,
    rollouts_ahead: int = 0,
    agent: str | object | None = None,
    agent_command: str | None = None,
    agent_timeout: float = 600.0,
    agent_retries: int = 0,
    agent_max_calls: int = 100,
    teacher_bits: Literal[16, 4] | None = None,
    jsd_beta: float = 0.5,
    distill_top_k: int = 0,
    parts: Any | Sequence[Any] = (),
    guard: Literal['warn', 'stop', 'off'] = 'warn',
    kl_budget: float = 0.0,
) -> Run:
    """Train a student on its own responses, each token of which a teacher scores.

    The other arguments are those of ``sft``; ``model`` is the student, ``data`` its prompts.

    Args:
        model: the student, as in ``sft``.
        data: rows with prompts.
        teacher: a model of the student's tokenizer, as ``model``; an adapter on the student's base
            shares its weights. A server's address, such as ``http://127.0.0.1:8000/v1``, too. By
            default the student as it was, with ``teacher_system_prompt``.
        rewards: what measures responses, as in ``rlhf``; nothing is learnt from it.
        eval_data: held-out prompts.
        output_dir: as in ``sft``.
        callbacks: as in ``sft``.
        resume: as in ``sft``.
        quiet: print nothing.
        **options: those of ``dschat-lora distill --help all``, by their names.

    Everyday options:
        actor_lora_dim=None: LoRA rank of a new adapter; 0 trains all weights; default: 16
        actor_learning_rate=None: peak learning rate; default: 0.0005 for the adapter, 9.65e-06 for base weights
        max_prompt_seq_len=256: maximum number of tokens of a prompt; --overlong applies to longer ones
        max_answer_seq_len=256: maximum number of tokens of a response
        per_device_training_batch_size=16: training batch size per device, in responses of one micro-batch
        num_train_epochs=1: number of training epochs; 0: evaluate only
        max_steps=0: number of optimizer steps (of rlhf by default 4 an iteration); 0: by --num_train_epochs
        gradient_accumulation_steps=1: micro-batches per optimizer step
        per_device_generation_batch_size=16: generation batch size per device, in responses
        generation_batches=1: generation batches per iteration
        temperature=1.0: temperature of sampling and of all log-probabilities
        rollout_engine='own': engine that generates responses: own, vllm, servers or module:Class
        dry_run=False: check options and data, print what the run would do, and exit
        eval_interval=0: optimizer steps between evaluations, besides those at the start, after each epoch and at the end
        report_to=('none',): trackers to which metrics are also reported
        base_bits=None: bits of the frozen base weights: 16, or 4 (QLoRA); default: those the loaded adapter was trained with, else 16
        zero_stage=None: ZeRO stage: 1 shards optimizer states over processes, 2 also gradients, 3 also weights; default: 0
        distill_loss='reverse_kl': divergence from the teacher
        teacher_system_prompt=None: system message put before each prompt for the teacher, but not for the actor
        on_policy_share=1.0: fraction of the responses that the actor generates, in [0, 1]

    169 more: `print(dl.distill.options)` lists all, by section, as
    `dschat-lora distill --help all` does in a terminal.
    """

def generate(
    model: Model | None,
    prompts: str | Sequence[str | Sequence[Message]],
    *,
    base_bits: Literal[16, 4] | None = None,
    max_seq_len: int = 0,
    columns: Sequence[str] | Mapping[str, str] = (),
    seed: int = 1234,
    dtype: Literal['auto', 'fp32', 'bf16', 'fp16'] = 'auto',
    per_device_eval_batch_size: int = 16,
    attn_implementation: Literal['auto', 'sdpa', 'eager'] = 'auto',
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    chat_template_kwargs: str | Mapping[str, Any] | None = None,
    chat: bool = False,
    max_new_tokens: int = 128,
    do_sample: bool | Literal['auto'] = 'auto',
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    num_return_sequences: int = 1,
    allow_image_urls: bool = False,
    max_image_pixels: int = 50000000,
    image: str | Sequence[str] = (),
) -> list[str]:
    """Answers to prompts, greedily unless sampling is asked for, as by a ``temperature``.

    Args:
        model: as in ``dschat_lora.sft``: a name, a path, a run, (model, tokenizer), or None for the
            bundled tiny model.
        prompts: texts to go on from, or messages that the chat template renders.
        **sampling: options of ``dschat-lora generate --help`` by their names, such as
            ``max_new_tokens``, ``do_sample``, ``temperature``, ``num_return_sequences``, ``seed``.
            ``chat=True`` takes texts for messages of a user.

    Returns:
        An answer to each prompt, in order; with ``num_return_sequences`` so many for each.

    Raises:
        TypeError: for an option that does not exist.
        ValueError: for a value that cannot be used, and a prompt that is too long.

    Options:
        base_bits=None: bits of the base weights: 16, or 4 (NF4); default: as the adapter was trained
        max_seq_len=0: maximum sequence length in tokens; 0: the model's number of positions
        columns=(): names of columns, as in prompt=question completion=answer
        seed=1234: random seed of sampling
        dtype='auto': compute dtype; auto: as in training
        per_device_eval_batch_size=16: batch size
        attn_implementation='auto': attention implementation of transformers; auto: sdpa if the model supports it, else eager
        trust_remote_code=False: allow running model code from a hub repository
        chat_template=None: Jinja file with a chat template, instead of the tokenizer's own
        chat_template_kwargs=None: JSON object of variables for the chat template, as in training
        chat=False: send --prompts as user messages through the chat template
        max_new_tokens=128: maximum number of tokens of an answer
        do_sample='auto': sample tokens instead of greedy decoding; auto: if --temperature, --top_p or --top_k is given
        temperature=1.0: sampling temperature
        top_p=1.0: sample from the most likely tokens with this total probability
        top_k=0: sample from this many most likely tokens; 0: all
        num_return_sequences=1: number of sampled answers per prompt
        allow_image_urls=False: download images whose rows give http(s) addresses
        max_image_pixels=50000000: maximum number of pixels of an image; larger ones are rejected before decoding
        image=(): image files placed before each of --prompts, or at its <image> placeholders
    """

def evaluate(
    model: Model | None,
    data: Data | None,
    *,
    base_bits: Literal[16, 4] | None = None,
    max_seq_len: int = 0,
    columns: Sequence[str] | Mapping[str, str] = (),
    dtype: Literal['auto', 'fp32', 'bf16', 'fp16'] = 'auto',
    per_device_eval_batch_size: int = 16,
    attn_implementation: Literal['auto', 'sdpa', 'eager'] = 'auto',
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    chat_template_kwargs: str | Mapping[str, Any] | None = None,
    reward_model: Model | None = None,
    judge_function: str | object | None = None,
    max_new_tokens: int = 128,
    limit: int = 0,
    tasks: str | Sequence[str] = (),
    num_fewshot: int | None = None,
    apply_chat_template: bool = False,
    allow_image_urls: bool = False,
    max_image_pixels: int = 50000000,
) -> dict[str, float]:
    """Perplexity, preferences or rewards of a model on rows of data.

    Args:
        model: as in ``generate``; of a reward model scores and preferences are measured.
        data: rows, as in ``dschat_lora.sft``; None with ``tasks``, which have their own.
        **options: those of ``dschat-lora eval --help`` by their names. ``judge_function`` may be a
            function, and ``reward_model`` a run.

    Returns:
        The numbers that the command prints, by name.

    Options:
        base_bits=None: bits of the base weights: 16, or 4 (NF4); default: as the adapter was trained
        max_seq_len=0: maximum sequence length in tokens; 0: the model's number of positions
        columns=(): names of columns, as in prompt=question completion=answer
        dtype='auto': compute dtype; auto: as in training
        per_device_eval_batch_size=16: batch size
        attn_implementation='auto': attention implementation of transformers; auto: sdpa if the model supports it, else eager
        trust_remote_code=False: allow running model code from a hub repository
        chat_template=None: Jinja file with a chat template, instead of the tokenizer's own
        chat_template_kwargs=None: JSON object of variables for the chat template, as in training
        reward_model=None: reward model that scores the model's greedy answers to the prompts
        judge_function=None: module:function that scores the same answers, as a reward function of step 3; builtin:NAME for a bundled one
        max_new_tokens=128: maximum number of tokens of such an answer
        limit=0: evaluate only the first N rows, or the first N of each task; 0: all
        tasks=(): tasks of lm-evaluation-harness, or directories with your own task files, instead of rows; needs dschat_lora[evaluation]
        num_fewshot=None: number of few-shot examples before each question of --tasks; default: the task's own
        apply_chat_template=False: send the questions of --tasks as user messages through the chat template
        allow_image_urls=False: download images whose rows give http(s) addresses
        max_image_pixels=50000000: maximum number of pixels of an image; larger ones are rejected before decoding
    """

def merge(
    model: Model,
    output_dir: str | os.PathLike[str] | None = None,
    *,
    base_bits: Literal[16, 4] | None = None,
    dtype: Literal['auto', 'fp32', 'bf16', 'fp16'] = 'auto',
    overwrite_output_dir: bool = False,
    merge_max_kl: float = 0.01,
    trust_remote_code: bool = False,
) -> Path:
    """Write base and adapter as one transformers model.

    Args:
        model: a run, or the path of one or of its adapter.
        output_dir: default: ``model/`` beside the adapter.
        **options: those of ``dschat-lora merge --help`` by their names.

    Returns:
        The directory of the model.

    Raises:
        ValueError: if there is not an adapter, or rounding moves the model by too much.

    Options:
        base_bits=None: bits of the base that the adapter is merged into: 16, or 4 (NF4); default: those it was trained on; the merged weights are never quantised
        dtype='auto': dtype of the saved weights; auto: that in which the base is stored
        overwrite_output_dir=False: overwrite a model in the output directory
        merge_max_kl=0.01: refuse a merge that changes the output distribution by more than this KL divergence (nats per token)
        trust_remote_code=False: allow running model code from a hub repository
    """

def audit(
    data: Data | None = None,
    model: Model | None = None,
    *,
    max_seq_len: int = 512,
    columns: Sequence[str] | Mapping[str, str] = (),
    eval_data_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    packing: bool = True,
    eval_ratio: float = 0.0,
    show: int = 0,
    stage: Literal['sft', 'reward', 'dpo', 'rlhf', 'distill'] = 'sft',
    seed: int = 1234,
    chat_template: str | None = None,
    trust_remote_code: bool = False,
    add_eot_token: bool = False,
    eot_token: str = '<|endoftext|>',
    data_split_name: str | Sequence[str] = (),
    data_weights: float | Sequence[float] = (),
    max_source_rows: int | Sequence[int] = (),
    max_repeats: int | Sequence[int] = (),
    data_split: str | None = None,
    data_output_path: str | os.PathLike[str] | None = None,
    overlong: Literal['split', 'drop', 'truncate', 'error'] = 'split',
    bad_rows: Literal['stop', 'skip'] = 'stop',
    unpaired_rows: Literal['refuse', 'good_only', 'all'] = 'refuse',
    preprocessing_num_workers: int = 0,
    chat_template_kwargs: str | Mapping[str, Any] | None = None,
    sft_only_data_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    train_on_prompt: bool = False,
    train_empty_think: bool = False,
    near_duplicates: float | None = None,
    against: str | Sequence[str] = (),
    against_ngram: int = 13,
    language_rows: int = 0,
    kept_path: str | os.PathLike[str] | None = None,
    overwrite_kept_path: bool = False,
    streaming: bool = False,
    shuffle_buffer_size: int = 10000,
    allow_image_urls: bool = False,
    max_image_pixels: int = 50000000,
) -> Audit:
    """What a stage would learn of data; nothing is trained.

    Args:
        data: rows, as in ``dschat_lora.sft``.
        model: whose tokenizer and chat template read them.
        **options: those of ``dschat-lora audit --help all`` by their names, such as
            ``stage="reward"`` and ``show=3``.

    Everyday options:
        max_seq_len=512: maximum number of tokens per row, prompt and completion together
        columns=(): names of your columns, as in prompt=question completion=answer
        eval_data_path=(): evaluation data, never trained on
        packing=True: pack several samples into rows of --max_seq_len
        eval_ratio=0.0: fraction of the rows held out for evaluation if there is no --eval_data_path, in [0, 1)
        show=0: number of samples to show token by token, with the supervised tokens marked
        stage='sft': stage for which rows are prepared: as sequences, pairs, or prompts of step 3
        seed=1234: random seed of --data_split and --eval_ratio

    28 more: `print(dl.audit.options)` lists all, by section, as
    `dschat-lora audit --help all` does in a terminal.
    """

def plan(
    stage: str,
    model: Model | None = None,
    data: Data | None = None,
    *,
    device: str | None = None,
    num_gpus: int | None = None,
    **options: object,
) -> Plan:
    """Memory and time of a stage, and settings that fit a device; no weights are loaded.

    Args:
        stage: "sft", "reward", "dpo", "rlhf" or "distill".
        model: as in ``dschat_lora.sft``, or the name of a published one without its files.
        data: rows, if their lengths are to count.
        device: memory such as "24GB", or the name of a card (the command's ``--for``).
        num_gpus: processes, one for each GPU.
        **options: those of the stage, by their names.

    Raises:
        ValueError: as the stage would refuse its options, or for an unknown architecture.
    """

def tune(
    stage: str,
    model: Model | None = None,
    data: Data | None = None,
    *,
    rates: Sequence[float] = (),
    ranks: Sequence[int] = (),
    batches: Sequence[int] = (),
    trials: int = 0,
    seeds: int = 1,
    jobs: int = 1,
    metric: str | None = None,
    min_steps: int = 0,
    reduction_factor: int = 3,
    output_dir: str | os.PathLike[str] | None = None,
    resume: bool = False,
    **options: object,
) -> Tuned:
    """Search for a stage's learning rate and, optionally, its rank and batch size by short runs.

    Needs ``dschat_lora[planning]``. Runs are separate processes; call it from the main thread.

    Args:
        stage: "sft", "reward", "dpo", "rlhf" or "distill".
        model: as in ``dschat_lora.sft``.
        data: a path, or several.
        rates: peak rates to try, of the adapter where there is one; by default that of the rules,
            times 1/8 to 8.
        ranks: values of ``lora_dim`` to try with each rate.
        batches: sizes of the training batch of a device to try with each.
        trials: in all; those beyond the listed ones are drawn where these were good.
        seeds: runs of a trial, whose mean counts.
        jobs: trials at a time.
        metric: held-out measure that decides; by default loss, of rlhf and distill reward.
        min_steps: optimizer steps after which a trial may end.
        reduction_factor: one of so many trials goes on.
        output_dir: of the search; the first free of ``output/tune-STAGE``, ... when absent.
        resume: go on with the search in ``output_dir``.
        **options: those of the stage, by their names; ``max_steps`` is a whole trial's length.

    Returns:
        The trials and the best options: ``dschat_lora.sft(model, data, **found.best)`` trains by
        them.

    Raises:
        TypeError: for an option that does not exist, and for rows, functions and other objects,
            which processes of their own cannot read.
        ValueError: for a value that cannot be used, or if no trial came to its end.
        SystemExit: after Ctrl-C, once the runs are saved; ``resume=True`` goes on.
    """

class Trainer(_Trainer):
    def __init__(
        self,
        model: Model | None = None,
        *,
        trust_remote_code: bool = False,
        add_eot_token: bool = False,
        eot_token: str = '<|endoftext|>',
        chat_template: str | None = None,
        dropout: float = 0.0,
        rope_scaling: str | None = None,
        per_device_train_batch_size: int = 16,
        seed: int = 1234,
        loraplus_lr_ratio: float = 1.0,
        adam_beta1: float = 0.9,
        adam_beta2: float = 0.95,
        adam_epsilon: float = 1e-08,
        max_grad_norm: float = 1.0,
        weight_decay: float = 0.0,
        lora_dim: int | None = None,
        lora_alpha: float = 32.0,
        target_modules: str | Sequence[str] = ('all-linear',),
        lora_dropout: float = 0.0,
        use_rslora: bool = False,
        train_bias: Literal['none', 'all', 'lora_only'] = 'none',
        modules_to_save: str | Sequence[str] = (),
        enable_lora: str | Sequence[str] = (),
        expert_lora_dim: int | None = None,
        expert_lora_alpha: float | None = None,
        only_optimize_lora: bool = True,
        per_device_eval_batch_size: int = 16,
        base_bits: Literal[16, 4] | None = None,
        zero_stage: Literal[0, 1, 2, 3] | None = None,
        gradient_checkpointing: bool | Literal['auto'] = 'auto',
        deepspeed_config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        dtype: Literal['auto', 'fp32', 'bf16', 'fp16'] = 'auto',
        offload_activations: bool = False,
        offload: bool = False,
        tensor_parallel_size: int = 1,
        sequence_parallel: bool = False,
        distributed_timeout: float = 120.0,
        attn_implementation: Literal['auto', 'sdpa', 'flex_attention', 'eager'] = 'auto',
        lora_module_name: str | None = None,
    ) -> None:
        """Load the model, put in or continue its adapter, and build its engine.

        Options:
            trust_remote_code=False: allow running model code from a hub repository
            add_eot_token=False: add --eot_token to the tokenizer and end every completion with it
            eot_token='<|endoftext|>': end-of-text token that --add_eot_token adds
            chat_template=None: Jinja file with a chat template instead of the tokenizer's; saved with the model
            dropout=0.0: dropout probability of the base model (all its dropout layers), in [0, 1)
            rope_scaling=None: JSON object that extends rotary position embeddings to longer rows, as in transformers, such as '{"rope_type": "yarn", "factor": 4.0}' (or linear, llama3); default: that of the loaded adapter's training, else the model's own
            per_device_train_batch_size=16: training batch size per device, in rows
            seed=1234: random seed of initialisation, data order and sampling
            loraplus_lr_ratio=1.0: LoRA+: ratio of the learning rates of lora_B and lora_A
            adam_beta1=0.9: beta1 of AdamW
            adam_beta2=0.95: beta2 of AdamW
            adam_epsilon=1e-08: epsilon of AdamW
            max_grad_norm=1.0: maximum gradient norm for clipping; 0: no clipping
            weight_decay=0.0: decoupled weight decay, not applied to biases and norms
            lora_dim=None: LoRA rank; 0 trains all weights; default: 16
            lora_alpha=32.0: LoRA alpha: the update is scaled by lora_alpha / lora_dim
            target_modules=('all-linear',): layers to adapt: all-linear, name suffixes, or one regular expression
            lora_dropout=0.0: dropout on the adapter's input, in [0, 1)
            use_rslora=False: scale the update by lora_alpha / sqrt(lora_dim) (rank-stabilised LoRA)
            train_bias='none': biases to train: none, all, or those of adapted layers (lora_only)
            modules_to_save=(): name suffixes of modules to train in full and save with the adapter
            enable_lora=(): parts (q, k, v) of a packed projection that get their own lora_A and lora_B; default: one pair for the whole layer
            expert_lora_dim=None: LoRA rank of each MoE expert; 0 leaves experts frozen; default: lora_dim divided by the number of active experts per token, at least 1
            expert_lora_alpha=None: LoRA alpha of MoE experts; default: lora_alpha
            only_optimize_lora=True: freeze the base model when lora_dim > 0 (no-: also train it)
            per_device_eval_batch_size=16: evaluation batch size per device
            base_bits=None: bits of the frozen base weights: 16, or 4 (QLoRA); default: those the loaded adapter was trained with, else 16
            zero_stage=None: ZeRO stage: 1 shards optimizer states over processes, 2 also gradients, 3 also weights; default: 0
            gradient_checkpointing='auto': recompute activations in the backward pass to save memory; auto: if they would not fit
            deepspeed_config=None: DeepSpeed JSON such as configs/ds/zero2.json; "auto" fields are filled in
            dtype='auto': compute dtype; auto: bf16 on GPUs that support it, fp16 on older GPUs, fp32 on CPU
            offload_activations=False: offload the checkpointed activations to pinned host memory until the backward pass; turns --gradient_checkpointing auto on
            offload=False: offload optimizer states (and, at stage 3, weights) to host memory
            tensor_parallel_size=1: number of processes over which each layer is split; they process the same data
            sequence_parallel=False: with --tensor_parallel_size above 1: split the activations between layers by tokens
            distributed_timeout=120.0: seconds without a sign of life from a process after which the run ends (at least 300 until the first step is done)
            attn_implementation='auto': attention implementation; auto: sdpa if the architecture supports it, else eager; sdpa computes the sequences of a packed row separately if it can; flex_attention is for GPUs if it cannot
            lora_module_name=None: adapt the linear layers whose name contains this (DeepSpeed-Chat's rule)
        """
