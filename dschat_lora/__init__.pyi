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
    trust_remote_code: bool = False,
    add_eot_token: bool = False,
    eot_token: str = '<|endoftext|>',
    chat_template: str | None = None,
    dropout: float = 0.0,
    router_aux_loss_coef: float = 0.0,
    rope_scaling: str | None = None,
    neftune_noise_alpha: float = 0.0,
    max_seq_len: int = 512,
    columns: Sequence[str] | Mapping[str, str] = (),
    packing: bool = True,
    eval_ratio: float = 0.05,
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
    learning_rate: float | Literal['auto'] = 5e-05,
    num_train_epochs: int = 1,
    max_steps: int = 0,
    per_device_train_batch_size: int = 16,
    gradient_accumulation_steps: int = 1,
    seed: int = 1234,
    num_warmup_steps: int = 0,
    lr_scheduler_type: Literal['linear', 'cosine', 'cosine_with_restarts', 'polynomial', 'constant', 'constant_with_warmup'] = 'cosine',
    tokens_per_device: int = 0,
    lora_learning_rate: float | None = None,
    lora_lr_multiplier: float | None = None,
    loraplus_lr_ratio: float = 1.0,
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.95,
    adam_epsilon: float = 1e-08,
    max_grad_norm: float = 1.0,
    expert_learning_rate: float | None = None,
    weight_decay: float = 0.0,
    early_stopping_patience: int = 0,
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
    dry_run: bool = False,
    verbose: bool = False,
    overwrite_output_dir: bool = False,
    save_interval: int = 500,
    merge_adapter: bool = False,
    accept_changed_data: bool = False,
    save_minutes: float = 10.0,
    save_total_limit: int = 3,
    merge_max_kl: float = 0.01,
    eval_interval: int = 0,
    eval_iters: int = 0,
    sample_generations: int = 2,
    per_device_eval_batch_size: int = 16,
    report_to: Literal['none', 'tensorboard', 'wandb', 'trackio'] | Sequence[Literal['none', 'tensorboard', 'wandb', 'trackio']] = ('none',),
    logging_steps: int = 1,
    tensorboard_path: str | os.PathLike[str] | None = None,
    base_bits: Literal[16, 4] | None = None,
    zero_stage: Literal[0, 1, 2, 3] | None = None,
    gradient_checkpointing: bool | Literal['auto'] = 'auto',
    deepspeed_config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    dtype: Literal['auto', 'fp32', 'bf16', 'fp16'] = 'auto',
    offload_activations: bool = False,
    offload: bool = False,
    tensor_parallel_size: int = 1,
    sequence_parallel: bool = False,
    context_parallel_size: int = 1,
    distributed_timeout: float = 120.0,
    attn_implementation: Literal['auto', 'sdpa', 'flex_attention', 'eager'] = 'auto',
    fused_kernels: Literal['auto', 'on', 'off'] = 'auto',
    compile: bool = False,
    training_graphs: Literal['auto', 'on', 'off'] = 'auto',
    eval_tasks: str | Sequence[str] = (),
    eval_tasks_limit: int = 0,
    streaming: bool = False,
    shuffle_buffer_size: int = 10000,
    allow_image_urls: bool = False,
    max_image_pixels: int = 50000000,
    train_vision: bool = False,
    vision_learning_rate: float | None = None,
    deepspeed: bool = False,
    print_loss: bool = False,
    compute_fp32_loss: bool = True,
    lora_module_name: str | None = None,
    enable_tensorboard: bool = False,
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

    Options:
        trust_remote_code (bool): allow running model code from a hub repository
        add_eot_token (bool): add --eot_token to the tokenizer and end every completion with it
        eot_token (str): end-of-text token that --add_eot_token adds
        chat_template (str | None): Jinja file with a chat template instead of the tokenizer's; saved with the model
        dropout (float): dropout probability of the base model (all its dropout layers), in [0, 1)
        router_aux_loss_coef (float): SFT: coefficient of the model's load-balancing loss for MoE experts; 0: not added
        rope_scaling (str | None): JSON object that extends rotary position embeddings to longer rows, as in transformers, such as '{"rope_type": "yarn", "factor": 4.0}' (or linear, llama3); default: that of the loaded adapter's training, else the model's own
        neftune_noise_alpha (float): SFT: NEFTune noise alpha (5 to 15): add uniform noise of up to alpha / sqrt(L d) to the embeddings in training, for L tokens of width d; 0: none
        max_seq_len (int): maximum number of tokens per row, prompt and completion together
        columns (Sequence[str] | Mapping[str, str]): names of your columns, as in prompt=question completion=answer; here the prompt is read from the column question, in all data
        packing (bool): pack several samples into rows of --max_seq_len; attention does not cross samples
        eval_ratio (float): fraction of the rows held out for evaluation if there is no --eval_data_path, in [0, 1)
        data_split_name (str | Sequence[str]): split of each --data_path that is a hub data set or a directory with splits, or one for all; default: train
        data_weights (float | Sequence[float]): how often each --data_path is used per epoch, in the same order; default: 1 each
        max_source_rows (int | Sequence[int]): use only the first N rows of each --data_path; one number for each, or one for all; 0: all
        max_repeats (int | Sequence[int]): maximum number of times a row of each --data_path is used in the whole run; one number for each, or one for all; 0: no limit
        data_split (str | None): proportions of the rows for steps 1, 2 and 3, such as 2,4,4; default: every step uses all rows
        data_output_path (str | os.PathLike[str] | None): cache directory for tokenized data; default: ~/.cache/dschat_lora
        overlong (Literal['split', 'drop', 'truncate', 'error']): what to do with samples longer than --max_seq_len: split cuts rows of `text` into pieces and drops other rows; drop drops all
        bad_rows (Literal['stop', 'skip']): what to do at an unusable row
        unpaired_rows (Literal['refuse', 'good_only', 'all']): what to do with answers that have a `label` (KTO rows): refuse to run, train only on those with label true, or train on all
        preprocessing_num_workers (int): number of processes that read and tokenize rows; 0: one per core, at most 16
        chat_template_kwargs (str | Mapping[str, Any] | None): JSON object of variables for the chat template, such as '{"enable_thinking": false}'; a column of this name in a row takes precedence
        sft_only_data_path (str | os.PathLike[str] | Sequence[str | os.PathLike[str]]): further data, used in full in step 1 only
        train_on_prompt (bool): compute the loss on the prompt too, also in evaluation (as DeepSpeed-Chat does, and microsoft/LoRA with --obj jlm)
        train_empty_think (bool): train on the empty thought that a chat template adds to answers without one, such as Qwen3's <think></think>, which teaches the model not to think
        learning_rate (float | Literal['auto']): peak learning rate of adapters (default 5e-4, DPO 1e-5) or of base weights; of adapters if only they are trained, except in the scripts of training/; auto: by published rules for width and stage, for adapters too
        num_train_epochs (int): number of training epochs; 0: evaluate only
        max_steps (int): number of optimizer steps; overrides --num_train_epochs; 0: by epochs
        per_device_train_batch_size (int): training batch size per device, in rows; of one micro-batch; a packed row holds several samples
        gradient_accumulation_steps (int): micro-batches per optimizer step
        seed (int): random seed of initialisation, data order and sampling
        num_warmup_steps (int): number of optimizer steps of linear warm-up
        lr_scheduler_type (Literal['linear', 'cosine', 'cosine_with_restarts', 'polynomial', 'constant', 'constant_with_warmup']): type of learning-rate schedule
        tokens_per_device (int): tokens per device and micro-batch, instead of a fixed number of rows; 0: by rows
        lora_learning_rate (float | None): peak learning rate of the adapters; default: --learning_rate if given, else 5e-4 (DPO 1e-5)
        lora_lr_multiplier (float | None): learning rate of the adapters as a multiple of --learning_rate; best measured: about 10, up to 15 in runs of 100 steps; 2 to 3 is cautious
        loraplus_lr_ratio (float): LoRA+: ratio of the learning rates of lora_B and lora_A
        adam_beta1 (float): beta1 of AdamW
        adam_beta2 (float): beta2 of AdamW
        adam_epsilon (float): epsilon of AdamW
        max_grad_norm (float): maximum gradient norm for clipping; 0: no clipping
        expert_learning_rate (float | None): peak learning rate of the adapters of MoE experts; default: that of the adapters
        weight_decay (float): decoupled weight decay, not applied to biases and norms
        early_stopping_patience (int): stop after this many consecutive evaluations without a new lowest held-out loss; 0: never
        lora_dim (int | None): LoRA rank; 0 trains all weights; default: 16 (training/ and --config: 0); an adapter that is trained further keeps its rank
        lora_alpha (float): LoRA alpha: the update is scaled by lora_alpha / lora_dim
        target_modules (str | Sequence[str]): layers to adapt: all-linear, name suffixes, or one regular expression
        lora_dropout (float): dropout on the adapter's input, in [0, 1)
        use_rslora (bool): scale the update by lora_alpha / sqrt(lora_dim) (rank-stabilised LoRA)
        train_bias (Literal['none', 'all', 'lora_only']): biases to train: none, all, or those of adapted layers (lora_only)
        modules_to_save (str | Sequence[str]): name suffixes of modules to train in full and save with the adapter
        enable_lora (str | Sequence[str]): parts (q, k, v) of a packed projection that get their own lora_A and lora_B; default: one pair for the whole layer
        expert_lora_dim (int | None): LoRA rank of each MoE expert; 0 leaves experts frozen; default: lora_dim divided by the number of active experts per token, at least 1
        expert_lora_alpha (float | None): LoRA alpha of MoE experts; default: lora_alpha
        only_optimize_lora (bool): freeze the base model when lora_dim > 0 (no-: also train it)
        dry_run (bool): check options and data, print what the run would do, and exit
        verbose (bool): with --dry_run: list all options
        overwrite_output_dir (bool): overwrite the files of an earlier run in --output_dir
        save_interval (int): optimizer steps between checkpoints; 0: by time only
        merge_adapter (bool): also save the adapter merged into the base, as a transformers model
        accept_changed_data (bool): with --resume_from_checkpoint: resume even if the data has changed since the checkpoint, or cannot be compared
        save_minutes (float): maximum minutes between checkpoints; 0: by steps only
        save_total_limit (int): number of newest checkpoints to keep; 0: all
        merge_max_kl (float): refuse a merge that changes the output distribution by more than this KL divergence (nats per token)
        eval_interval (int): optimizer steps between evaluations; 0: at the start, each epoch and the end
        eval_iters (int): maximum number of evaluation batches per device; 0: all
        sample_generations (int): number of held-out prompts answered before and after training
        per_device_eval_batch_size (int): evaluation batch size per device
        report_to (Literal['none', 'tensorboard', 'wandb', 'trackio'] | Sequence[Literal['none', 'tensorboard', 'wandb', 'trackio']]): trackers to which metrics are also reported; one or several; their own variables, such as WANDB_MODE=offline, apply
        logging_steps (int): optimizer steps between logged lines
        tensorboard_path (str | os.PathLike[str] | None): directory for TensorBoard files; default: OUTPUT_DIR/tensorboard
        base_bits (Literal[16, 4] | None): bits of the frozen base weights: 16, or 4 (QLoRA); default: those the loaded adapter was trained with, else 16; 4 is NF4, for linear layers and experts of the transformer blocks
        zero_stage (Literal[0, 1, 2, 3] | None): ZeRO stage: 1 shards optimizer states over processes, 2 also gradients, 3 also weights; default: 0; or that of --deepspeed_config
        gradient_checkpointing (bool | Literal['auto']): recompute activations in the backward pass to save memory; auto: if they would not fit; without a value: on; auto uses an estimate, and on a GPU may split micro-batches instead if that is faster and their size is not given
        deepspeed_config (str | os.PathLike[str] | Mapping[str, Any] | None): DeepSpeed JSON such as configs/ds/zero2.json; "auto" fields are filled in
        dtype (Literal['auto', 'fp32', 'bf16', 'fp16']): compute dtype; auto: bf16 on GPUs that support it, fp16 on older GPUs, fp32 on CPU
        offload_activations (bool): offload the checkpointed activations to pinned host memory until the backward pass; turns --gradient_checkpointing auto on
        offload (bool): offload optimizer states (and, at stage 3, weights) to host memory
        tensor_parallel_size (int): number of processes over which each layer is split; they process the same data
        sequence_parallel (bool): with --tensor_parallel_size above 1: split the activations between layers by tokens
        context_parallel_size (int): SFT, reward, DPO: number of processes over which the tokens of each row are split, for long rows; attention stays exact over the whole row
        distributed_timeout (float): seconds without a sign of life from a process after which the run ends (at least 300 until the first step is done)
        attn_implementation (Literal['auto', 'sdpa', 'flex_attention', 'eager']): attention implementation; auto: sdpa if the architecture supports it, else eager; sdpa computes the sequences of a packed row separately if it can; flex_attention is for GPUs if it cannot
        fused_kernels (Literal['auto', 'on', 'off']): use fused kernels for RMSNorm, SwiGLU and rotary embeddings if they match the architecture's own; auto: on a GPU
        compile (bool): compile the transformer blocks with torch.compile: slower start, faster steps
        training_graphs (Literal['auto', 'on', 'off']): replay the forward and backward pass below the head as CUDA graphs; auto: if launching kernels would take longer than running them; micro-batches are padded to a few shapes; needs ZeRO 0 and no dropout
        eval_tasks (str | Sequence[str]): SFT and DPO: tasks of lm-evaluation-harness, or directories of task files, to run at each evaluation; needs dschat_lora[evaluation]
        eval_tasks_limit (int): maximum number of questions from each of --eval_tasks; 0: all
        streaming (bool): read, tokenize and pack rows during training, in bounded memory, instead of preparing all of them first; needs --max_steps
        shuffle_buffer_size (int): number of rows that --streaming shuffles and packs at a time; the order of shards is shuffled too
        allow_image_urls (bool): download images whose rows give http(s) addresses
        max_image_pixels (int): maximum number of pixels of an image; larger ones are rejected before decoding
        train_vision (bool): also adapt the linear layers of the vision encoder and its projector
        vision_learning_rate (float | None): learning rate of the vision adapters (of --train_vision or --target_modules); default: that of the others
        deepspeed (bool): accepted from DeepSpeed, which is always used
        print_loss (bool): print the loss at every optimizer step
        compute_fp32_loss (bool): accepted from DeepSpeed-Chat; the loss is always computed in fp32
        lora_module_name (str | None): adapt the linear layers whose name contains this (DeepSpeed-Chat's rule)
        enable_tensorboard (bool): same as --report_to tensorboard
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
    trust_remote_code: bool = False,
    add_eot_token: bool = False,
    eot_token: str = '<|endoftext|>',
    chat_template: str | None = None,
    dropout: float = 0.0,
    router_aux_loss_coef: float = 0.0,
    rope_scaling: str | None = None,
    neftune_noise_alpha: float = 0.0,
    max_seq_len: int = 512,
    columns: Sequence[str] | Mapping[str, str] = (),
    packing: bool = False,
    eval_ratio: float = 0.05,
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
    learning_rate: float | Literal['auto'] = 5e-05,
    num_train_epochs: int = 1,
    max_steps: int = 0,
    per_device_train_batch_size: int = 16,
    gradient_accumulation_steps: int = 1,
    seed: int = 1234,
    num_warmup_steps: int = 0,
    lr_scheduler_type: Literal['linear', 'cosine', 'cosine_with_restarts', 'polynomial', 'constant', 'constant_with_warmup'] = 'cosine',
    tokens_per_device: int = 0,
    lora_learning_rate: float | None = None,
    lora_lr_multiplier: float | None = None,
    loraplus_lr_ratio: float = 1.0,
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.95,
    adam_epsilon: float = 1e-08,
    max_grad_norm: float = 1.0,
    expert_learning_rate: float | None = None,
    weight_decay: float = 0.0,
    early_stopping_patience: int = 0,
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
    reward_loss: Literal['bradley_terry', 'per_token'] = 'bradley_terry',
    share_prompt: bool = True,
    center_rewards_coefficient: float = 0.0,
    dry_run: bool = False,
    verbose: bool = False,
    overwrite_output_dir: bool = False,
    save_interval: int = 500,
    merge_adapter: bool = False,
    accept_changed_data: bool = False,
    save_minutes: float = 10.0,
    save_total_limit: int = 3,
    merge_max_kl: float = 0.01,
    eval_interval: int = 0,
    eval_iters: int = 0,
    sample_generations: int = 2,
    per_device_eval_batch_size: int = 16,
    report_to: Literal['none', 'tensorboard', 'wandb', 'trackio'] | Sequence[Literal['none', 'tensorboard', 'wandb', 'trackio']] = ('none',),
    logging_steps: int = 1,
    tensorboard_path: str | os.PathLike[str] | None = None,
    base_bits: Literal[16, 4] | None = None,
    zero_stage: Literal[0, 1, 2, 3] | None = None,
    gradient_checkpointing: bool | Literal['auto'] = 'auto',
    deepspeed_config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    dtype: Literal['auto', 'fp32', 'bf16', 'fp16'] = 'auto',
    offload_activations: bool = False,
    offload: bool = False,
    tensor_parallel_size: int = 1,
    sequence_parallel: bool = False,
    context_parallel_size: int = 1,
    distributed_timeout: float = 120.0,
    attn_implementation: Literal['auto', 'sdpa', 'flex_attention', 'eager'] = 'auto',
    fused_kernels: Literal['auto', 'on', 'off'] = 'auto',
    compile: bool = False,
    training_graphs: Literal['auto', 'on', 'off'] = 'auto',
    eval_tasks: str | Sequence[str] = (),
    eval_tasks_limit: int = 0,
    streaming: bool = False,
    shuffle_buffer_size: int = 10000,
    allow_image_urls: bool = False,
    max_image_pixels: int = 50000000,
    train_vision: bool = False,
    vision_learning_rate: float | None = None,
    deepspeed: bool = False,
    print_loss: bool = False,
    compute_fp32_loss: bool = True,
    lora_module_name: str | None = None,
    enable_tensorboard: bool = False,
    num_padding_at_beginning: int = 1,
) -> Run:
    """Train a reward model on pairs of answers (step 2); arguments as those of ``sft``.

    Options:
        trust_remote_code (bool): allow running model code from a hub repository
        add_eot_token (bool): add --eot_token to the tokenizer and end every completion with it
        eot_token (str): end-of-text token that --add_eot_token adds
        chat_template (str | None): Jinja file with a chat template instead of the tokenizer's; saved with the model
        dropout (float): dropout probability of the base model (all its dropout layers), in [0, 1)
        router_aux_loss_coef (float): SFT: coefficient of the model's load-balancing loss for MoE experts; 0: not added
        rope_scaling (str | None): JSON object that extends rotary position embeddings to longer rows, as in transformers, such as '{"rope_type": "yarn", "factor": 4.0}' (or linear, llama3); default: that of the loaded adapter's training, else the model's own
        neftune_noise_alpha (float): SFT: NEFTune noise alpha (5 to 15): add uniform noise of up to alpha / sqrt(L d) to the embeddings in training, for L tokens of width d; 0: none
        max_seq_len (int): maximum number of tokens per row, prompt and completion together
        columns (Sequence[str] | Mapping[str, str]): names of your columns, as in prompt=question completion=answer; here the prompt is read from the column question, in all data
        packing (bool): pack several samples into rows of --max_seq_len; attention does not cross samples
        eval_ratio (float): fraction of the rows held out for evaluation if there is no --eval_data_path, in [0, 1)
        data_split_name (str | Sequence[str]): split of each --data_path that is a hub data set or a directory with splits, or one for all; default: train
        data_weights (float | Sequence[float]): how often each --data_path is used per epoch, in the same order; default: 1 each
        max_source_rows (int | Sequence[int]): use only the first N rows of each --data_path; one number for each, or one for all; 0: all
        max_repeats (int | Sequence[int]): maximum number of times a row of each --data_path is used in the whole run; one number for each, or one for all; 0: no limit
        data_split (str | None): proportions of the rows for steps 1, 2 and 3, such as 2,4,4; default: every step uses all rows
        data_output_path (str | os.PathLike[str] | None): cache directory for tokenized data; default: ~/.cache/dschat_lora
        overlong (Literal['split', 'drop', 'truncate', 'error']): what to do with samples longer than --max_seq_len: split cuts rows of `text` into pieces and drops other rows; drop drops all
        bad_rows (Literal['stop', 'skip']): what to do at an unusable row
        unpaired_rows (Literal['refuse', 'good_only', 'all']): what to do with answers that have a `label` (KTO rows): refuse to run, train only on those with label true, or train on all
        preprocessing_num_workers (int): number of processes that read and tokenize rows; 0: one per core, at most 16
        chat_template_kwargs (str | Mapping[str, Any] | None): JSON object of variables for the chat template, such as '{"enable_thinking": false}'; a column of this name in a row takes precedence
        sft_only_data_path (str | os.PathLike[str] | Sequence[str | os.PathLike[str]]): further data, used in full in step 1 only
        train_on_prompt (bool): compute the loss on the prompt too, also in evaluation (as DeepSpeed-Chat does, and microsoft/LoRA with --obj jlm)
        train_empty_think (bool): train on the empty thought that a chat template adds to answers without one, such as Qwen3's <think></think>, which teaches the model not to think
        learning_rate (float | Literal['auto']): peak learning rate of adapters (default 5e-4, DPO 1e-5) or of base weights; of adapters if only they are trained, except in the scripts of training/; auto: by published rules for width and stage, for adapters too
        num_train_epochs (int): number of training epochs; 0: evaluate only
        max_steps (int): number of optimizer steps; overrides --num_train_epochs; 0: by epochs
        per_device_train_batch_size (int): training batch size per device, in rows; of one micro-batch; a packed row holds several samples
        gradient_accumulation_steps (int): micro-batches per optimizer step
        seed (int): random seed of initialisation, data order and sampling
        num_warmup_steps (int): number of optimizer steps of linear warm-up
        lr_scheduler_type (Literal['linear', 'cosine', 'cosine_with_restarts', 'polynomial', 'constant', 'constant_with_warmup']): type of learning-rate schedule
        tokens_per_device (int): tokens per device and micro-batch, instead of a fixed number of rows; 0: by rows
        lora_learning_rate (float | None): peak learning rate of the adapters; default: --learning_rate if given, else 5e-4 (DPO 1e-5)
        lora_lr_multiplier (float | None): learning rate of the adapters as a multiple of --learning_rate; best measured: about 10, up to 15 in runs of 100 steps; 2 to 3 is cautious
        loraplus_lr_ratio (float): LoRA+: ratio of the learning rates of lora_B and lora_A
        adam_beta1 (float): beta1 of AdamW
        adam_beta2 (float): beta2 of AdamW
        adam_epsilon (float): epsilon of AdamW
        max_grad_norm (float): maximum gradient norm for clipping; 0: no clipping
        expert_learning_rate (float | None): peak learning rate of the adapters of MoE experts; default: that of the adapters
        weight_decay (float): decoupled weight decay, not applied to biases and norms
        early_stopping_patience (int): stop after this many consecutive evaluations without a new lowest held-out loss; 0: never
        lora_dim (int | None): LoRA rank; 0 trains all weights; default: 16 (training/ and --config: 0); an adapter that is trained further keeps its rank
        lora_alpha (float): LoRA alpha: the update is scaled by lora_alpha / lora_dim
        target_modules (str | Sequence[str]): layers to adapt: all-linear, name suffixes, or one regular expression
        lora_dropout (float): dropout on the adapter's input, in [0, 1)
        use_rslora (bool): scale the update by lora_alpha / sqrt(lora_dim) (rank-stabilised LoRA)
        train_bias (Literal['none', 'all', 'lora_only']): biases to train: none, all, or those of adapted layers (lora_only)
        modules_to_save (str | Sequence[str]): name suffixes of modules to train in full and save with the adapter
        enable_lora (str | Sequence[str]): parts (q, k, v) of a packed projection that get their own lora_A and lora_B; default: one pair for the whole layer
        expert_lora_dim (int | None): LoRA rank of each MoE expert; 0 leaves experts frozen; default: lora_dim divided by the number of active experts per token, at least 1
        expert_lora_alpha (float | None): LoRA alpha of MoE experts; default: lora_alpha
        only_optimize_lora (bool): freeze the base model when lora_dim > 0 (no-: also train it)
        reward_loss (Literal['bradley_terry', 'per_token']): loss of the reward model; bradley_terry compares the scores at the ends of the two answers; per_token is DeepSpeed-Chat's loss; which compares them at each token from the first difference on
        share_prompt (bool): compute the common prompt of a pair once (no-: once per answer)
        center_rewards_coefficient (float): coefficient of the squared sum of a pair's scores, which keeps scores centered around 0
        dry_run (bool): check options and data, print what the run would do, and exit
        verbose (bool): with --dry_run: list all options
        overwrite_output_dir (bool): overwrite the files of an earlier run in --output_dir
        save_interval (int): optimizer steps between checkpoints; 0: by time only
        merge_adapter (bool): also save the adapter merged into the base, as a transformers model
        accept_changed_data (bool): with --resume_from_checkpoint: resume even if the data has changed since the checkpoint, or cannot be compared
        save_minutes (float): maximum minutes between checkpoints; 0: by steps only
        save_total_limit (int): number of newest checkpoints to keep; 0: all
        merge_max_kl (float): refuse a merge that changes the output distribution by more than this KL divergence (nats per token)
        eval_interval (int): optimizer steps between evaluations; 0: at the start, each epoch and the end
        eval_iters (int): maximum number of evaluation batches per device; 0: all
        sample_generations (int): number of held-out prompts answered before and after training
        per_device_eval_batch_size (int): evaluation batch size per device
        report_to (Literal['none', 'tensorboard', 'wandb', 'trackio'] | Sequence[Literal['none', 'tensorboard', 'wandb', 'trackio']]): trackers to which metrics are also reported; one or several; their own variables, such as WANDB_MODE=offline, apply
        logging_steps (int): optimizer steps between logged lines
        tensorboard_path (str | os.PathLike[str] | None): directory for TensorBoard files; default: OUTPUT_DIR/tensorboard
        base_bits (Literal[16, 4] | None): bits of the frozen base weights: 16, or 4 (QLoRA); default: those the loaded adapter was trained with, else 16; 4 is NF4, for linear layers and experts of the transformer blocks
        zero_stage (Literal[0, 1, 2, 3] | None): ZeRO stage: 1 shards optimizer states over processes, 2 also gradients, 3 also weights; default: 0; or that of --deepspeed_config
        gradient_checkpointing (bool | Literal['auto']): recompute activations in the backward pass to save memory; auto: if they would not fit; without a value: on; auto uses an estimate, and on a GPU may split micro-batches instead if that is faster and their size is not given
        deepspeed_config (str | os.PathLike[str] | Mapping[str, Any] | None): DeepSpeed JSON such as configs/ds/zero2.json; "auto" fields are filled in
        dtype (Literal['auto', 'fp32', 'bf16', 'fp16']): compute dtype; auto: bf16 on GPUs that support it, fp16 on older GPUs, fp32 on CPU
        offload_activations (bool): offload the checkpointed activations to pinned host memory until the backward pass; turns --gradient_checkpointing auto on
        offload (bool): offload optimizer states (and, at stage 3, weights) to host memory
        tensor_parallel_size (int): number of processes over which each layer is split; they process the same data
        sequence_parallel (bool): with --tensor_parallel_size above 1: split the activations between layers by tokens
        context_parallel_size (int): SFT, reward, DPO: number of processes over which the tokens of each row are split, for long rows; attention stays exact over the whole row
        distributed_timeout (float): seconds without a sign of life from a process after which the run ends (at least 300 until the first step is done)
        attn_implementation (Literal['auto', 'sdpa', 'flex_attention', 'eager']): attention implementation; auto: sdpa if the architecture supports it, else eager; sdpa computes the sequences of a packed row separately if it can; flex_attention is for GPUs if it cannot
        fused_kernels (Literal['auto', 'on', 'off']): use fused kernels for RMSNorm, SwiGLU and rotary embeddings if they match the architecture's own; auto: on a GPU
        compile (bool): compile the transformer blocks with torch.compile: slower start, faster steps
        training_graphs (Literal['auto', 'on', 'off']): replay the forward and backward pass below the head as CUDA graphs; auto: if launching kernels would take longer than running them; micro-batches are padded to a few shapes; needs ZeRO 0 and no dropout
        eval_tasks (str | Sequence[str]): SFT and DPO: tasks of lm-evaluation-harness, or directories of task files, to run at each evaluation; needs dschat_lora[evaluation]
        eval_tasks_limit (int): maximum number of questions from each of --eval_tasks; 0: all
        streaming (bool): read, tokenize and pack rows during training, in bounded memory, instead of preparing all of them first; needs --max_steps
        shuffle_buffer_size (int): number of rows that --streaming shuffles and packs at a time; the order of shards is shuffled too
        allow_image_urls (bool): download images whose rows give http(s) addresses
        max_image_pixels (int): maximum number of pixels of an image; larger ones are rejected before decoding
        train_vision (bool): also adapt the linear layers of the vision encoder and its projector
        vision_learning_rate (float | None): learning rate of the vision adapters (of --train_vision or --target_modules); default: that of the others
        deepspeed (bool): accepted from DeepSpeed, which is always used
        print_loss (bool): print the loss at every optimizer step
        compute_fp32_loss (bool): accepted from DeepSpeed-Chat; the loss is always computed in fp32
        lora_module_name (str | None): adapt the linear layers whose name contains this (DeepSpeed-Chat's rule)
        enable_tensorboard (bool): same as --report_to tensorboard
        num_padding_at_beginning (int): accepted from DeepSpeed-Chat; nothing is guessed from padding
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
    trust_remote_code: bool = False,
    add_eot_token: bool = False,
    eot_token: str = '<|endoftext|>',
    chat_template: str | None = None,
    dropout: float = 0.0,
    router_aux_loss_coef: float = 0.0,
    rope_scaling: str | None = None,
    neftune_noise_alpha: float = 0.0,
    max_seq_len: int = 512,
    columns: Sequence[str] | Mapping[str, str] = (),
    packing: bool = False,
    eval_ratio: float = 0.05,
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
    learning_rate: float | Literal['auto'] = 1e-06,
    num_train_epochs: int = 1,
    max_steps: int = 0,
    per_device_train_batch_size: int = 16,
    gradient_accumulation_steps: int = 1,
    seed: int = 1234,
    num_warmup_steps: int = 0,
    lr_scheduler_type: Literal['linear', 'cosine', 'cosine_with_restarts', 'polynomial', 'constant', 'constant_with_warmup'] = 'cosine',
    tokens_per_device: int = 0,
    lora_learning_rate: float | None = None,
    lora_lr_multiplier: float | None = None,
    loraplus_lr_ratio: float = 1.0,
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.95,
    adam_epsilon: float = 1e-08,
    max_grad_norm: float = 1.0,
    expert_learning_rate: float | None = None,
    weight_decay: float = 0.0,
    early_stopping_patience: int = 0,
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
    loss_type: Literal['sigmoid', 'ipo', 'hinge', 'orpo', 'simpo', 'kto'] = 'sigmoid',
    beta: float = 0.1,
    share_prompt: bool = True,
    label_smoothing: float = 0.0,
    simpo_gamma: float = 0.5,
    length_normalization: bool = False,
    rpo_alpha: float = 0.0,
    precompute_ref_log_probs: bool = True,
    dry_run: bool = False,
    verbose: bool = False,
    overwrite_output_dir: bool = False,
    save_interval: int = 500,
    merge_adapter: bool = False,
    accept_changed_data: bool = False,
    save_minutes: float = 10.0,
    save_total_limit: int = 3,
    merge_max_kl: float = 0.01,
    eval_interval: int = 0,
    eval_iters: int = 0,
    sample_generations: int = 2,
    per_device_eval_batch_size: int = 16,
    report_to: Literal['none', 'tensorboard', 'wandb', 'trackio'] | Sequence[Literal['none', 'tensorboard', 'wandb', 'trackio']] = ('none',),
    logging_steps: int = 1,
    tensorboard_path: str | os.PathLike[str] | None = None,
    base_bits: Literal[16, 4] | None = None,
    zero_stage: Literal[0, 1, 2, 3] | None = None,
    gradient_checkpointing: bool | Literal['auto'] = 'auto',
    deepspeed_config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    dtype: Literal['auto', 'fp32', 'bf16', 'fp16'] = 'auto',
    offload_activations: bool = False,
    offload: bool = False,
    tensor_parallel_size: int = 1,
    sequence_parallel: bool = False,
    context_parallel_size: int = 1,
    distributed_timeout: float = 120.0,
    attn_implementation: Literal['auto', 'sdpa', 'flex_attention', 'eager'] = 'auto',
    fused_kernels: Literal['auto', 'on', 'off'] = 'auto',
    compile: bool = False,
    training_graphs: Literal['auto', 'on', 'off'] = 'auto',
    eval_tasks: str | Sequence[str] = (),
    eval_tasks_limit: int = 0,
    streaming: bool = False,
    shuffle_buffer_size: int = 10000,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    allow_image_urls: bool = False,
    max_image_pixels: int = 50000000,
    train_vision: bool = False,
    vision_learning_rate: float | None = None,
    deepspeed: bool = False,
    print_loss: bool = False,
    compute_fp32_loss: bool = True,
    lora_module_name: str | None = None,
    enable_tensorboard: bool = False,
    num_padding_at_beginning: int = 1,
    offload_reference_model: bool = False,
) -> Run:
    """Train a policy by DPO, ORPO, SimPO or KTO; arguments as those of ``sft``.

    Options:
        trust_remote_code (bool): allow running model code from a hub repository
        add_eot_token (bool): add --eot_token to the tokenizer and end every completion with it
        eot_token (str): end-of-text token that --add_eot_token adds
        chat_template (str | None): Jinja file with a chat template instead of the tokenizer's; saved with the model
        dropout (float): dropout probability of the base model (all its dropout layers), in [0, 1)
        router_aux_loss_coef (float): SFT: coefficient of the model's load-balancing loss for MoE experts; 0: not added
        rope_scaling (str | None): JSON object that extends rotary position embeddings to longer rows, as in transformers, such as '{"rope_type": "yarn", "factor": 4.0}' (or linear, llama3); default: that of the loaded adapter's training, else the model's own
        neftune_noise_alpha (float): SFT: NEFTune noise alpha (5 to 15): add uniform noise of up to alpha / sqrt(L d) to the embeddings in training, for L tokens of width d; 0: none
        max_seq_len (int): maximum number of tokens per row, prompt and completion together
        columns (Sequence[str] | Mapping[str, str]): names of your columns, as in prompt=question completion=answer; here the prompt is read from the column question, in all data
        packing (bool): pack several samples into rows of --max_seq_len; attention does not cross samples
        eval_ratio (float): fraction of the rows held out for evaluation if there is no --eval_data_path, in [0, 1)
        data_split_name (str | Sequence[str]): split of each --data_path that is a hub data set or a directory with splits, or one for all; default: train
        data_weights (float | Sequence[float]): how often each --data_path is used per epoch, in the same order; default: 1 each
        max_source_rows (int | Sequence[int]): use only the first N rows of each --data_path; one number for each, or one for all; 0: all
        max_repeats (int | Sequence[int]): maximum number of times a row of each --data_path is used in the whole run; one number for each, or one for all; 0: no limit
        data_split (str | None): proportions of the rows for steps 1, 2 and 3, such as 2,4,4; default: every step uses all rows
        data_output_path (str | os.PathLike[str] | None): cache directory for tokenized data; default: ~/.cache/dschat_lora
        overlong (Literal['split', 'drop', 'truncate', 'error']): what to do with samples longer than --max_seq_len: split cuts rows of `text` into pieces and drops other rows; drop drops all
        bad_rows (Literal['stop', 'skip']): what to do at an unusable row
        unpaired_rows (Literal['refuse', 'good_only', 'all']): what to do with answers that have a `label` (KTO rows): refuse to run, train only on those with label true, or train on all
        preprocessing_num_workers (int): number of processes that read and tokenize rows; 0: one per core, at most 16
        chat_template_kwargs (str | Mapping[str, Any] | None): JSON object of variables for the chat template, such as '{"enable_thinking": false}'; a column of this name in a row takes precedence
        sft_only_data_path (str | os.PathLike[str] | Sequence[str | os.PathLike[str]]): further data, used in full in step 1 only
        train_on_prompt (bool): compute the loss on the prompt too, also in evaluation (as DeepSpeed-Chat does, and microsoft/LoRA with --obj jlm)
        train_empty_think (bool): train on the empty thought that a chat template adds to answers without one, such as Qwen3's <think></think>, which teaches the model not to think
        learning_rate (float | Literal['auto']): peak learning rate of adapters (default 5e-4, DPO 1e-5) or of base weights; of adapters if only they are trained, except in the scripts of training/; auto: by published rules for width and stage, for adapters too
        num_train_epochs (int): number of training epochs; 0: evaluate only
        max_steps (int): number of optimizer steps; overrides --num_train_epochs; 0: by epochs
        per_device_train_batch_size (int): training batch size per device, in rows; of one micro-batch; a packed row holds several samples
        gradient_accumulation_steps (int): micro-batches per optimizer step
        seed (int): random seed of initialisation, data order and sampling
        num_warmup_steps (int): number of optimizer steps of linear warm-up
        lr_scheduler_type (Literal['linear', 'cosine', 'cosine_with_restarts', 'polynomial', 'constant', 'constant_with_warmup']): type of learning-rate schedule
        tokens_per_device (int): tokens per device and micro-batch, instead of a fixed number of rows; 0: by rows
        lora_learning_rate (float | None): peak learning rate of the adapters; default: --learning_rate if given, else 5e-4 (DPO 1e-5)
        lora_lr_multiplier (float | None): learning rate of the adapters as a multiple of --learning_rate; best measured: about 10, up to 15 in runs of 100 steps; 2 to 3 is cautious
        loraplus_lr_ratio (float): LoRA+: ratio of the learning rates of lora_B and lora_A
        adam_beta1 (float): beta1 of AdamW
        adam_beta2 (float): beta2 of AdamW
        adam_epsilon (float): epsilon of AdamW
        max_grad_norm (float): maximum gradient norm for clipping; 0: no clipping
        expert_learning_rate (float | None): peak learning rate of the adapters of MoE experts; default: that of the adapters
        weight_decay (float): decoupled weight decay, not applied to biases and norms
        early_stopping_patience (int): stop after this many consecutive evaluations without a new lowest held-out loss; 0: never
        lora_dim (int | None): LoRA rank; 0 trains all weights; default: 16 (training/ and --config: 0); an adapter that is trained further keeps its rank
        lora_alpha (float): LoRA alpha: the update is scaled by lora_alpha / lora_dim
        target_modules (str | Sequence[str]): layers to adapt: all-linear, name suffixes, or one regular expression
        lora_dropout (float): dropout on the adapter's input, in [0, 1)
        use_rslora (bool): scale the update by lora_alpha / sqrt(lora_dim) (rank-stabilised LoRA)
        train_bias (Literal['none', 'all', 'lora_only']): biases to train: none, all, or those of adapted layers (lora_only)
        modules_to_save (str | Sequence[str]): name suffixes of modules to train in full and save with the adapter
        enable_lora (str | Sequence[str]): parts (q, k, v) of a packed projection that get their own lora_A and lora_B; default: one pair for the whole layer
        expert_lora_dim (int | None): LoRA rank of each MoE expert; 0 leaves experts frozen; default: lora_dim divided by the number of active experts per token, at least 1
        expert_lora_alpha (float | None): LoRA alpha of MoE experts; default: lora_alpha
        only_optimize_lora (bool): freeze the base model when lora_dim > 0 (no-: also train it)
        loss_type (Literal['sigmoid', 'ipo', 'hinge', 'orpo', 'simpo', 'kto']): loss of pairs, where sigmoid is DPO's original, or of single answers: kto; ipo is IPO's squared loss, hinge that of SLiC; orpo and simpo use no reference; kto takes single answers labelled good or bad
        beta (float): strength of the KL constraint to the reference; a larger beta keeps the policy closer; orpo: weight of the odds ratio; simpo: scale of the rewards, by default 2
        share_prompt (bool): compute the common prompt of a pair once (no-: once per answer)
        label_smoothing (float): label smoothing: assumed fraction of wrong labels (conservative DPO, simpo), in [0, 0.5)
        simpo_gamma (float): simpo: target margin between the rewards of the chosen and the rejected answer
        length_normalization (bool): compare log-ratios per token instead of per answer; ipo, orpo and simpo always do
        rpo_alpha (float): weight of the chosen answer's per-token NLL loss, added to the pair's loss
        precompute_ref_log_probs (bool): compute the reference's log-probabilities once before training (no-: at each step)
        dry_run (bool): check options and data, print what the run would do, and exit
        verbose (bool): with --dry_run: list all options
        overwrite_output_dir (bool): overwrite the files of an earlier run in --output_dir
        save_interval (int): optimizer steps between checkpoints; 0: by time only
        merge_adapter (bool): also save the adapter merged into the base, as a transformers model
        accept_changed_data (bool): with --resume_from_checkpoint: resume even if the data has changed since the checkpoint, or cannot be compared
        save_minutes (float): maximum minutes between checkpoints; 0: by steps only
        save_total_limit (int): number of newest checkpoints to keep; 0: all
        merge_max_kl (float): refuse a merge that changes the output distribution by more than this KL divergence (nats per token)
        eval_interval (int): optimizer steps between evaluations; 0: at the start, each epoch and the end
        eval_iters (int): maximum number of evaluation batches per device; 0: all
        sample_generations (int): number of held-out prompts answered before and after training
        per_device_eval_batch_size (int): evaluation batch size per device
        report_to (Literal['none', 'tensorboard', 'wandb', 'trackio'] | Sequence[Literal['none', 'tensorboard', 'wandb', 'trackio']]): trackers to which metrics are also reported; one or several; their own variables, such as WANDB_MODE=offline, apply
        logging_steps (int): optimizer steps between logged lines
        tensorboard_path (str | os.PathLike[str] | None): directory for TensorBoard files; default: OUTPUT_DIR/tensorboard
        base_bits (Literal[16, 4] | None): bits of the frozen base weights: 16, or 4 (QLoRA); default: those the loaded adapter was trained with, else 16; 4 is NF4, for linear layers and experts of the transformer blocks
        zero_stage (Literal[0, 1, 2, 3] | None): ZeRO stage: 1 shards optimizer states over processes, 2 also gradients, 3 also weights; default: 0; or that of --deepspeed_config
        gradient_checkpointing (bool | Literal['auto']): recompute activations in the backward pass to save memory; auto: if they would not fit; without a value: on; auto uses an estimate, and on a GPU may split micro-batches instead if that is faster and their size is not given
        deepspeed_config (str | os.PathLike[str] | Mapping[str, Any] | None): DeepSpeed JSON such as configs/ds/zero2.json; "auto" fields are filled in
        dtype (Literal['auto', 'fp32', 'bf16', 'fp16']): compute dtype; auto: bf16 on GPUs that support it, fp16 on older GPUs, fp32 on CPU
        offload_activations (bool): offload the checkpointed activations to pinned host memory until the backward pass; turns --gradient_checkpointing auto on
        offload (bool): offload optimizer states (and, at stage 3, weights) to host memory
        tensor_parallel_size (int): number of processes over which each layer is split; they process the same data
        sequence_parallel (bool): with --tensor_parallel_size above 1: split the activations between layers by tokens
        context_parallel_size (int): SFT, reward, DPO: number of processes over which the tokens of each row are split, for long rows; attention stays exact over the whole row
        distributed_timeout (float): seconds without a sign of life from a process after which the run ends (at least 300 until the first step is done)
        attn_implementation (Literal['auto', 'sdpa', 'flex_attention', 'eager']): attention implementation; auto: sdpa if the architecture supports it, else eager; sdpa computes the sequences of a packed row separately if it can; flex_attention is for GPUs if it cannot
        fused_kernels (Literal['auto', 'on', 'off']): use fused kernels for RMSNorm, SwiGLU and rotary embeddings if they match the architecture's own; auto: on a GPU
        compile (bool): compile the transformer blocks with torch.compile: slower start, faster steps
        training_graphs (Literal['auto', 'on', 'off']): replay the forward and backward pass below the head as CUDA graphs; auto: if launching kernels would take longer than running them; micro-batches are padded to a few shapes; needs ZeRO 0 and no dropout
        eval_tasks (str | Sequence[str]): SFT and DPO: tasks of lm-evaluation-harness, or directories of task files, to run at each evaluation; needs dschat_lora[evaluation]
        eval_tasks_limit (int): maximum number of questions from each of --eval_tasks; 0: all
        streaming (bool): read, tokenize and pack rows during training, in bounded memory, instead of preparing all of them first; needs --max_steps
        shuffle_buffer_size (int): number of rows that --streaming shuffles and packs at a time; the order of shards is shuffled too
        desirable_weight (float): kto: weight of the loss on desirable answers
        undesirable_weight (float): kto: weight of the loss on undesirable answers
        allow_image_urls (bool): download images whose rows give http(s) addresses
        max_image_pixels (int): maximum number of pixels of an image; larger ones are rejected before decoding
        train_vision (bool): also adapt the linear layers of the vision encoder and its projector
        vision_learning_rate (float | None): learning rate of the vision adapters (of --train_vision or --target_modules); default: that of the others
        deepspeed (bool): accepted from DeepSpeed, which is always used
        print_loss (bool): print the loss at every optimizer step
        compute_fp32_loss (bool): accepted from DeepSpeed-Chat; the loss is always computed in fp32
        lora_module_name (str | None): adapt the linear layers whose name contains this (DeepSpeed-Chat's rule)
        enable_tensorboard (bool): same as --report_to tensorboard
        num_padding_at_beginning (int): accepted from DeepSpeed-Chat; nothing is guessed from padding
        offload_reference_model (bool): accepted from DeepSpeed-Chat; the reference is never a second model
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
    actor_learning_rate: float | Literal['auto'] = 9.65e-06,
    actor_lora_alpha: float = 32.0,
    actor_use_rslora: bool = False,
    actor_expert_lora_dim: int | None = None,
    actor_expert_lora_alpha: float | None = None,
    actor_target_modules: str | Sequence[str] = ('all-linear',),
    actor_lora_learning_rate: float = 0.0005,
    actor_expert_learning_rate: float | None = None,
    actor_weight_decay: float = 0.0,
    actor_zero_stage: Literal[0, 1, 2, 3] | None = None,
    actor_gradient_checkpointing: bool | Literal['auto'] = 'auto',
    critic_lora_dim: int | None = None,
    critic_lora_alpha: float = 32.0,
    critic_use_rslora: bool = False,
    critic_expert_lora_dim: int | None = None,
    critic_expert_lora_alpha: float | None = None,
    critic_target_modules: str | Sequence[str] = ('all-linear',),
    critic_learning_rate: float | Literal['auto'] = 5e-06,
    critic_lora_learning_rate: float = 0.0005,
    critic_expert_learning_rate: float | None = None,
    critic_weight_decay: float = 0.0,
    critic_zero_stage: Literal[0, 1, 2, 3] | None = None,
    critic_gradient_checkpointing: bool | Literal['auto'] = 'auto',
    trust_remote_code: bool = False,
    add_eot_token: bool = False,
    eot_token: str = '<|endoftext|>',
    chat_template: str | None = None,
    max_prompt_seq_len: int = 256,
    max_answer_seq_len: int = 256,
    columns: Sequence[str] | Mapping[str, str] = (),
    eval_ratio: float = 0.05,
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
    num_prompts: int = 0,
    per_device_training_batch_size: int = 16,
    num_train_epochs: int = 1,
    max_steps: int = 0,
    gradient_accumulation_steps: int = 1,
    seed: int = 1234,
    num_warmup_steps: int = 0,
    lr_scheduler_type: Literal['linear', 'cosine', 'cosine_with_restarts', 'polynomial', 'constant', 'constant_with_warmup'] = 'cosine',
    tokens_per_device: int = 0,
    loraplus_lr_ratio: float = 1.0,
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.95,
    adam_epsilon: float = 1e-08,
    max_grad_norm: float = 1.0,
    enable_ema: bool = False,
    ema_decay: float = 0.992,
    only_optimize_lora: bool = True,
    num_generations: int | None = None,
    per_device_generation_batch_size: int = 16,
    generation_batches: int = 1,
    rollout_engine: Literal['own', 'vllm'] | str | object = 'own',
    max_num_seqs: int | Literal['auto'] = 'auto',
    merge_for_rollouts: bool = False,
    refill_share: float | None = None,
    do_sample: bool = True,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop_tokens: str | Sequence[str] = (),
    stop_strings: str | Sequence[str] = (),
    environment: str | object | None = None,
    max_turns: int = 8,
    reward_weights: float | Sequence[float] = (),
    reward_batch: Literal['all', 'group'] = 'all',
    reward_retries: int = 0,
    reward_timeout: float = 0.0,
    clip_reward_value: float = 5.0,
    reward_scaling: Literal['none', 'running', 'initial'] = 'initial',
    missing_eos_penalty: float = 0.0,
    soft_overlong_tokens: int = 0,
    algorithm: Literal['ppo', 'rloo', 'grpo', 'reinforce_pp', 'reinforce_pp_baseline', 'dr_grpo', 'dapo', 'gspo', 'cispo', 'gdpo', 'sapo', 'distill'] | str | Callable[..., Any] | Algorithm = 'ppo',
    kl_coef: float | None = None,
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
    dry_run: bool = False,
    verbose: bool = False,
    overwrite_output_dir: bool = False,
    save_interval: int = 500,
    merge_adapter: bool = False,
    accept_changed_data: bool = False,
    save_minutes: float = 10.0,
    save_total_limit: int = 3,
    merge_max_kl: float = 0.01,
    eval_interval: int = 0,
    eval_iters: int = 0,
    sample_generations: int = 2,
    judge_function: str | object | None = None,
    eval_prompts: int = 64,
    report_to: Literal['none', 'tensorboard', 'wandb', 'trackio'] | Sequence[Literal['none', 'tensorboard', 'wandb', 'trackio']] = ('none',),
    logging_steps: int = 1,
    log_rollouts: int = 128,
    print_answers: bool = False,
    print_answers_interval: int = 10,
    tensorboard_path: str | os.PathLike[str] | None = None,
    base_bits: Literal[16, 4] | None = None,
    zero_stage: Literal[0, 1, 2, 3] | None = None,
    deepspeed_config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    dtype: Literal['auto', 'fp32', 'bf16', 'fp16'] = 'auto',
    offload_activations: bool = False,
    offload: bool = False,
    tensor_parallel_size: int = 1,
    sequence_parallel: bool = False,
    context_parallel_size: int = 1,
    distributed_timeout: float = 120.0,
    attn_implementation: Literal['auto', 'sdpa', 'flex_attention', 'eager'] = 'auto',
    fused_kernels: Literal['auto', 'on', 'off'] = 'auto',
    compile: bool = False,
    training_graphs: Literal['auto', 'on', 'off'] = 'auto',
    release_inference_cache: bool = False,
    streaming: bool = False,
    shuffle_buffer_size: int = 10000,
    allow_image_urls: bool = False,
    max_image_pixels: int = 50000000,
    train_vision: bool = False,
    vision_learning_rate: float | None = None,
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
    deepspeed: bool = False,
    print_loss: bool = False,
    actor_lora_module_name: str | None = None,
    actor_dropout: float = 0.0,
    critic_lora_module_name: str | None = None,
    critic_dropout: float = 0.0,
    compute_fp32_loss: bool = True,
    enable_test_mode: bool = False,
    test_stop_step: int = 0,
    num_padding_at_beginning: int = 1,
    align_overflow: bool = False,
    offload_reference_model: bool = False,
    offload_reward_model: bool = False,
    enable_hybrid_engine: bool = False,
    unpin_actor_parameters: bool = False,
    inference_tp_size: int = 1,
    tp_gather_partition_size: int = 8,
    enable_mixed_precision_lora: bool = False,
    enable_tensorboard: bool = False,
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

    Options:
        actor_lora_dim (int | None): LoRA rank of a new adapter; 0 trains all weights; default: 16 (training/ and --config: 0); an adapter that is trained further keeps its rank
        actor_learning_rate (float | Literal['auto']): peak learning rate of the adapter (default 5e-4) or of base weights; of the adapter if only it is trained, except in the script of training/; auto: by published rules for width and stage, for the adapter too
        actor_lora_alpha (float): LoRA alpha: the update is scaled by lora_alpha / lora_dim
        actor_use_rslora (bool): scale by lora_alpha / sqrt(lora_dim)
        actor_expert_lora_dim (int | None): LoRA rank of each MoE expert; 0 leaves experts frozen; default: lora_dim divided by the number of active experts per token, at least 1
        actor_expert_lora_alpha (float | None): LoRA alpha of MoE experts; default: lora_alpha
        actor_target_modules (str | Sequence[str]): layers to adapt: all-linear, name suffixes, or one regular expression
        actor_lora_learning_rate (float): peak learning rate of the adapter
        actor_expert_learning_rate (float | None): peak learning rate of the adapters of MoE experts; default: that of the adapter
        actor_weight_decay (float): decoupled weight decay, not applied to biases and norms
        actor_zero_stage (Literal[0, 1, 2, 3] | None): ZeRO stage of this role; default: --zero_stage
        actor_gradient_checkpointing (bool | Literal['auto']): recompute activations in the backward pass to save memory; auto: if they would not fit; without a value: on; auto uses an estimate, and on a GPU may split micro-batches instead if that is faster and their size is not given
        critic_lora_dim (int | None): LoRA rank of a new adapter; 0 trains all weights; default: 16 (training/ and --config: 0); an adapter that is trained further keeps its rank
        critic_lora_alpha (float): LoRA alpha: the update is scaled by lora_alpha / lora_dim
        critic_use_rslora (bool): scale by lora_alpha / sqrt(lora_dim)
        critic_expert_lora_dim (int | None): LoRA rank of each MoE expert; 0 leaves experts frozen; default: lora_dim divided by the number of active experts per token, at least 1
        critic_expert_lora_alpha (float | None): LoRA alpha of MoE experts; default: lora_alpha
        critic_target_modules (str | Sequence[str]): layers to adapt: all-linear, name suffixes, or one regular expression
        critic_learning_rate (float | Literal['auto']): peak learning rate of the adapter (default 5e-4) or of base weights; of the adapter if only it is trained, except in the script of training/; auto: by published rules for width and stage, for the adapter too
        critic_lora_learning_rate (float): peak learning rate of the adapter
        critic_expert_learning_rate (float | None): peak learning rate of the adapters of MoE experts; default: that of the adapter
        critic_weight_decay (float): decoupled weight decay, not applied to biases and norms
        critic_zero_stage (Literal[0, 1, 2, 3] | None): ZeRO stage of this role; default: --zero_stage
        critic_gradient_checkpointing (bool | Literal['auto']): recompute activations in the backward pass to save memory; auto: if they would not fit; without a value: on; auto uses an estimate, and on a GPU may split micro-batches instead if that is faster and their size is not given
        trust_remote_code (bool): allow running model code from a hub repository
        add_eot_token (bool): add --eot_token to the tokenizer and end every completion with it
        eot_token (str): end-of-text token that --add_eot_token adds
        chat_template (str | None): Jinja file with a chat template instead of the tokenizer's; saved with the model
        max_prompt_seq_len (int): maximum number of tokens of a prompt; --overlong applies to longer ones
        max_answer_seq_len (int): maximum number of tokens of a response
        columns (Sequence[str] | Mapping[str, str]): names of your columns, as in prompt=question completion=answer; here the prompt is read from the column question, in all data
        eval_ratio (float): fraction of the rows held out for evaluation if there is no --eval_data_path, in [0, 1)
        data_split_name (str | Sequence[str]): split of each --data_path that is a hub data set or a directory with splits, or one for all; default: train
        data_weights (float | Sequence[float]): how often each --data_path is used per epoch, in the same order; default: 1 each
        max_source_rows (int | Sequence[int]): use only the first N rows of each --data_path; one number for each, or one for all; 0: all
        max_repeats (int | Sequence[int]): maximum number of times a row of each --data_path is used in the whole run; one number for each, or one for all; 0: no limit
        data_split (str | None): proportions of the rows for steps 1, 2 and 3, such as 2,4,4; default: every step uses all rows
        data_output_path (str | os.PathLike[str] | None): cache directory for tokenized data; default: ~/.cache/dschat_lora
        overlong (Literal['split', 'drop', 'truncate', 'error']): what to do with samples longer than --max_seq_len: split cuts rows of `text` into pieces and drops other rows; drop drops all
        bad_rows (Literal['stop', 'skip']): what to do at an unusable row
        unpaired_rows (Literal['refuse', 'good_only', 'all']): what to do with answers that have a `label` (KTO rows): refuse to run, train only on those with label true, or train on all
        preprocessing_num_workers (int): number of processes that read and tokenize rows; 0: one per core, at most 16
        chat_template_kwargs (str | Mapping[str, Any] | None): JSON object of variables for the chat template, such as '{"enable_thinking": false}'; a column of this name in a row takes precedence
        num_prompts (int): number of episodes whose prompts an --environment class makes itself, instead of --data_path; reset receives the index of the episode, from 0, as `episode`
        per_device_training_batch_size (int): training batch size per device, in responses of one micro-batch
        num_train_epochs (int): number of training epochs; 0: evaluate only
        max_steps (int): number of optimizer steps; overrides --num_train_epochs; 0: by epochs
        gradient_accumulation_steps (int): micro-batches per optimizer step
        seed (int): random seed of initialisation, data order and sampling
        num_warmup_steps (int): number of optimizer steps of linear warm-up
        lr_scheduler_type (Literal['linear', 'cosine', 'cosine_with_restarts', 'polynomial', 'constant', 'constant_with_warmup']): type of learning-rate schedule
        tokens_per_device (int): maximum number of tokens per micro-batch and device, instead of a number of responses; 0: by responses
        loraplus_lr_ratio (float): LoRA+: ratio of the learning rates of lora_B and lora_A
        adam_beta1 (float): beta1 of AdamW
        adam_beta2 (float): beta2 of AdamW
        adam_epsilon (float): epsilon of AdamW
        max_grad_norm (float): maximum gradient norm for clipping; 0: no clipping
        enable_ema (bool): keep an exponential moving average of the actor, saved to actor_ema/
        ema_decay (float): decay of the moving average
        only_optimize_lora (bool): freeze base models that have an adapter (no-: also train them)
        num_generations (int | None): responses per prompt (8, or 1 if they are not compared); default: by --algorithm; at least 2, except for ppo and reinforce_pp, which do not compare them; 8, or a smaller divisor of --per_device_generation_batch_size
        per_device_generation_batch_size (int): generation batch size per device, in responses
        generation_batches (int): generation batches per iteration; if no batch size is given, as many as make 64 responses over all processes
        rollout_engine (Literal['own', 'vllm'] | str | object): engine that generates responses: own, vllm, servers or module:Class; vllm, which the run starts itself; the comma-separated addresses of servers (vLLM, SGLang or `dschat-lora serve`) that load adapters at run time, such as http://127.0.0.1:8000; or your own module:Class
        max_num_seqs (int | Literal['auto']): maximum number of responses decoded at a time per device; does not affect results; auto: as many as fit into free memory on a GPU, a generation batch on a CPU; auto is a generation batch for episodes
        merge_for_rollouts (bool): generate with the adapter merged into copies of the adapted weights: faster on a GPU, but takes their memory; 16-bit copies are rounded stochastically (by --seed), and the metric sampler_error shows the effect on the policy
        refill_share (float | None): fraction of the responses in decoding that must have finished before the next prompts of the iteration take their places; 0: each at once (0.25 on a GPU, 0 on a CPU)
        do_sample (bool): sample responses (no-: greedy decoding)
        temperature (float): temperature of sampling and of all log-probabilities
        top_p (float): sample from the most likely tokens with this total probability
        top_k (int): sample from this many most likely tokens; 0: all
        stop_tokens (str | Sequence[str]): further tokens that end a response, in addition to those of tokenizer, template and model
        stop_strings (str | Sequence[str]): strings that end a response at the token that completes them
        environment (str | object | None): environment that replies to the actor's turns: module:function, module:Class, or one from a library, such as gymnasium:ENV_ID; a function returns user or tool messages, or ends the episode; a class has reset, step or tools, and rewards; module:Player has play(tasks, draw, *, key), which generates the responses; libraries are gymnasium:ENV_ID, reasoning_gym:TASK, verifiers:TASKSET, openenv:URL, and mcp:COMMAND or mcp:URL, which provide tools
        max_turns (int): maximum number of actor turns in an episode of --environment, which share the length of one response
        reward_weights (float | Sequence[float]): weight of each reward in the sum of scores: those of a class in the order of its names, that of the reward model, if there is one, last; default: 1 each
        reward_batch (Literal['all', 'group']): responses per call: all of a process, or those to one prompt
        reward_retries (int): number of retries of a failed call to a reward function or environment
        reward_timeout (float): timeout in seconds of a call to a reward function or environment; 0: none
        clip_reward_value (float): clip scaled scores to this absolute value; 0: never
        reward_scaling (Literal['none', 'running', 'initial']): running: divide scores by their running standard deviation; initial: subtract the mean and divide by the standard deviation of the first iterations' scores (at least 64); the critic starts in these units (with none and running, in those of the reward model)
        missing_eos_penalty (float): penalty subtracted from the score of a truncated response
        soft_overlong_tokens (int): reduce the score linearly, by up to 1, over the last N tokens of --max_answer_seq_len (DAPO's soft overlong punishment; dapo: a fifth of them); 0: never
        algorithm (Literal['ppo', 'rloo', 'grpo', 'reinforce_pp', 'reinforce_pp_baseline', 'dr_grpo', 'dapo', 'gspo', 'cispo', 'gdpo', 'sapo', 'distill'] | str | Callable[..., Any] | Algorithm): reinforcement-learning algorithm; ppo has a critic; reinforce_pp has none; grpo and its variants compare the responses to each prompt
        kl_coef (float | None): coefficient of the KL divergence from the reference (0.1 or 0); default: by --algorithm
        ppo_epochs (int): number of passes over the responses of each iteration
        kl_estimator (Literal['k1', 'k2', 'k3'] | None): estimator of the KL divergence at each token; default: by --algorithm
        kl_in (Literal['reward', 'loss'] | None): where the KL penalty is applied: to the reward of each token, or in the loss; default: by --algorithm
        adaptive_kl_target (float): target KL divergence in nats per response, towards which kl_coef is adapted; 0: constant kl_coef
        kl_horizon (int): horizon in responses over which kl_coef adapts
        gamma (float): discount factor, in [0, 1]
        lam (float): lambda of generalized advantage estimation (GAE), in [0, 1]; below 1, the score at the end reaches a token t positions earlier with weight lam^t, and the critic's values account for the rest
        cliprange (float | None): clipping range of the probability ratio in both directions (0.2); default: by --algorithm
        cliprange_low (float | None): lower clipping range of the ratio; default: --cliprange; default: by --algorithm
        cliprange_high (float | None): upper clipping range of the ratio; default: --cliprange; default: by --algorithm
        dual_clip (float): dual clip: limit the loss of a token with negative advantage A to -A times this; 0: off
        sapo_temperature_pos (float): SAPO: temperature of the gate on tokens with positive advantage; a higher one restricts the ratio more
        sapo_temperature_neg (float): SAPO: temperature of the gate on all other tokens; normally above --sapo_temperature_pos
        loss_normalization (Literal['token', 'sequence', 'constant'] | None): how the loss is averaged; token: over all tokens; sequence: over responses; constant: divided by --max_answer_seq_len; default: by --algorithm
        mask_truncated_completions (bool | None): exclude truncated responses from the loss (DAPO's overlong filtering); default: by --algorithm
        dynamic_sampling (int | None): replace prompts whose responses all received the same reward, at most this many times per iteration (DAPO's dynamic sampling); 0: never; default: by --algorithm
        cliprange_value (float): clipping range of the value loss
        whiten_advantages (bool): normalize the advantages of each iteration to mean 0 and standard deviation 1
        critic_warmup_iterations (int): number of iterations at the start in which only the critic is trained
        importance_cap (float): maximum importance weight of a token in the policy loss: its probability under the policy over that under the sampling distribution (top-p, top-k, another temperature); 0: no weights; same as --rollout_correction tis with this --rollout_is_threshold
        rollout_correction (Literal['none', 'tis', 'mis'] | None): importance sampling in the policy loss if tokens are not sampled from the policy that is trained; tis: weights truncated at --rollout_is_threshold; mis: weights beyond it are set to 0; default: none with --rollout_engine own, else tis
        rollout_is (Literal['token', 'sequence']): level of the importance weights: one per token, or per response the product over its tokens
        rollout_is_threshold (float): upper threshold of the weights of --rollout_correction
        rollout_is_threshold_lower (float): lower threshold of the weights: tis raises lower ones to it, mis sets them to 0
        use_rollout_logprobs (bool): take old log-probabilities from the decode loop instead of a forward pass, which is faster; the metric sampler_error shows the rounding difference
        entropy_coef (float): coefficient of the entropy bonus
        target_kl (float): stop the updates of an iteration when the approximate KL divergence to the policy at its start exceeds this (mean nats per token); 0: never
        unsupervised_dataset_name (str | None): pretraining text to mix in: files, a directory or a hub data set (name:config)
        unsupervised_dataset_config_name (str | None): configuration of a hub data set, as in name:configuration
        unsup_coef (float): coefficient of the pretraining loss per token, relative to the policy loss
        dry_run (bool): check options and data, print what the run would do, and exit
        verbose (bool): with --dry_run: list all options
        overwrite_output_dir (bool): overwrite the files of an earlier run in --output_dir
        save_interval (int): optimizer steps between checkpoints; 0: by time only
        merge_adapter (bool): also save the adapter merged into the base, as a transformers model
        accept_changed_data (bool): with --resume_from_checkpoint: resume even if the data has changed since the checkpoint, or cannot be compared
        save_minutes (float): maximum minutes between checkpoints; 0: by steps only
        save_total_limit (int): number of newest checkpoints to keep; 0: all
        merge_max_kl (float): refuse a merge that changes the output distribution by more than this KL divergence (nats per token)
        eval_interval (int): optimizer steps between evaluations; 0: at the start, each epoch and the end
        eval_iters (int): maximum number of evaluation batches per device; 0: all
        sample_generations (int): number of held-out prompts answered before and after training
        judge_function (str | object | None): module:function that scores held-out responses in evaluations, never in training
        eval_prompts (int): number of held-out prompts answered in each evaluation, greedily and by sampling; 0: none, and none are held out unless --eval_ratio is given
        report_to (Literal['none', 'tensorboard', 'wandb', 'trackio'] | Sequence[Literal['none', 'tensorboard', 'wandb', 'trackio']]): trackers to which metrics are also reported; one or several; their own variables, such as WANDB_MODE=offline, apply
        logging_steps (int): optimizer steps between logged lines
        log_rollouts (int): number of responses per iteration logged to rollouts.jsonl.gz; 0: none
        print_answers (bool): print a response at every iteration
        print_answers_interval (int): iterations between printed responses; 0: never
        tensorboard_path (str | os.PathLike[str] | None): directory for TensorBoard files; default: OUTPUT_DIR/tensorboard
        base_bits (Literal[16, 4] | None): bits of the frozen base weights: 16, or 4 (QLoRA); default: those the loaded adapter was trained with, else 16; 4 is NF4, for linear layers and experts of the transformer blocks
        zero_stage (Literal[0, 1, 2, 3] | None): ZeRO stage: 1 shards optimizer states over processes, 2 also gradients, 3 also weights; default: 0; or that of --deepspeed_config
        deepspeed_config (str | os.PathLike[str] | Mapping[str, Any] | None): DeepSpeed JSON such as configs/ds/zero2.json; "auto" fields are filled in
        dtype (Literal['auto', 'fp32', 'bf16', 'fp16']): compute dtype; auto: bf16 on GPUs that support it, fp16 on older GPUs, fp32 on CPU
        offload_activations (bool): offload the checkpointed activations to pinned host memory until the backward pass; turns --gradient_checkpointing auto on
        offload (bool): offload optimizer states (and, at stage 3, weights) to host memory
        tensor_parallel_size (int): number of processes over which each layer is split; they process the same data
        sequence_parallel (bool): with --tensor_parallel_size above 1: split the activations between layers by tokens
        context_parallel_size (int): SFT, reward, DPO: number of processes over which the tokens of each row are split, for long rows; attention stays exact over the whole row
        distributed_timeout (float): seconds without a sign of life from a process after which the run ends (at least 300 until the first step is done)
        attn_implementation (Literal['auto', 'sdpa', 'flex_attention', 'eager']): attention implementation; auto: sdpa if the architecture supports it, else eager; sdpa computes the sequences of a packed row separately if it can; flex_attention is for GPUs if it cannot
        fused_kernels (Literal['auto', 'on', 'off']): use fused kernels for RMSNorm, SwiGLU and rotary embeddings if they match the architecture's own; auto: on a GPU
        compile (bool): compile the transformer blocks with torch.compile: slower start, faster steps
        training_graphs (Literal['auto', 'on', 'off']): replay the forward and backward pass below the head as CUDA graphs; auto: if launching kernels would take longer than running them; micro-batches are padded to a few shapes; needs ZeRO 0 and no dropout
        release_inference_cache (bool): free the KV cache before each update (default: keep it if the GPU has room for it)
        streaming (bool): read, tokenize and pack rows during training, in bounded memory, instead of preparing all of them first; needs --max_steps
        shuffle_buffer_size (int): number of rows that --streaming shuffles and packs at a time; the order of shards is shuffled too
        allow_image_urls (bool): download images whose rows give http(s) addresses
        max_image_pixels (int): maximum number of pixels of an image; larger ones are rejected before decoding
        train_vision (bool): also adapt the linear layers of the vision encoder and its projector
        vision_learning_rate (float | None): learning rate of the vision adapters (of --train_vision or --target_modules); default: that of the others
        vllm_command (str | None): command that starts the server of --rollout_engine vllm, such as `/envs/vllm/bin/vllm serve` for vLLM in another environment, with further options if needed; default: `vllm serve`
        vllm_gpu_memory_utilization (float): fraction of GPU memory (of host memory without a GPU) that --rollout_engine vllm uses while it generates; on a GPU it sleeps during training
        rollout_adapter_dir (str | os.PathLike[str] | None): directory, shared with the servers of --rollout_engine, from which they load the adapter; default: one in memory, for servers on this machine
        rollout_timeout (float): timeout in seconds for a response of a rollout or teacher server, and for vllm to start
        rollouts_ahead (int): number of iterations that the servers of --rollout_engine generate ahead of training, with an adapter at most this many iterations old; --rollout_correction corrects for it; 0: synchronous
        agent (str | object | None): module:function that runs an episode: it receives the row and an openai client connected to the actor, may call it any number of times, and returns the reward
        agent_command (str | None): command that runs an episode: it reads the row from standard input, reaches the actor at OPENAI_BASE_URL, and prints the reward on its last line
        agent_timeout (float): time limit of an agent's episode in seconds, not counting the time the actor takes to answer
        agent_retries (int): number of retries of an agent's episode that failed
        agent_max_calls (int): maximum number of actor responses in an agent's episode
        teacher_model_name_or_path (str | os.PathLike[str] | None): teacher: a model, run or adapter, or a server's http://HOST:PORT/v1; default: the initial actor, with --teacher_system_prompt; used by --algorithm distill; a run, an adapter, a model directory or a hub name, with the actor's tokenizer; an adapter on the actor's base shares its weights; a server is vLLM or `dschat-lora serve`, with #NAME if it has several models
        teacher_bits (Literal[16, 4] | None): bits of the teacher's base, 16 or 4 (NF4); default: as for --base_bits
        teacher_system_prompt (str | None): system message put before each prompt for the teacher, but not for the actor
        distill_loss (Literal['reverse_kl', 'forward_kl', 'jsd', 'sampled_reverse_kl']): divergence from the teacher; per token over the whole vocabulary: reverse_kl, forward_kl or jsd (generalised, GKD); or sampled_reverse_kl, estimated from the sampled tokens and used as their advantage
        jsd_beta (float): interpolation coefficient of --distill_loss jsd: the teacher's weight in the mixture, in (0, 1)
        distill_top_k (int): number of the teacher's most likely tokens over which the divergence is computed; all others are treated as one token; 0: the whole vocabulary
        on_policy_share (float): fraction of the responses that the actor generates, in [0, 1]; the others are completions from the data (GKD's lambda)
        parts (Any | Sequence[Any]): one or more module:Class whose objects are called after every step and iteration (after_step, after_iteration), for your own metrics, logs and coefficients
        guard (Literal['warn', 'stop', 'off']): what to do when the entropy collapses, responses double or halve in length or stop ending, the reward rises while the judge's or the held-out reward falls, or --kl_budget is exceeded: warn, stop with a checkpoint, or nothing (off)
        kl_budget (float): KL divergence from the reference that --guard allows, in nats per response; 0: no limit
        deepspeed (bool): accepted from DeepSpeed, which is always used
        print_loss (bool): print the loss at every optimizer step
        actor_lora_module_name (str | None): adapt the linear layers whose name contains this (DeepSpeed-Chat's rule)
        actor_dropout (float): accepted from DeepSpeed-Chat; old and new log-probabilities need one network
        critic_lora_module_name (str | None): adapt the linear layers whose name contains this (DeepSpeed-Chat's rule)
        critic_dropout (float): accepted from DeepSpeed-Chat; old and new log-probabilities need one network
        compute_fp32_loss (bool): accepted from DeepSpeed-Chat; the loss is always computed in fp32
        enable_test_mode (bool): stop after --test_stop_step optimizer steps
        test_stop_step (int): number of optimizer steps of --enable_test_mode
        num_padding_at_beginning (int): accepted from DeepSpeed-Chat; nothing is inferred from padding
        align_overflow (bool): accepted from DeepSpeed-Chat; a non-finite loss skips both steps
        offload_reference_model (bool): accepted from DeepSpeed-Chat; the reference shares the actor's base
        offload_reward_model (bool): accepted from DeepSpeed-Chat; the reward model shares the critic's base
        enable_hybrid_engine (bool): accepted from DeepSpeed-Chat; rollouts have their own decode loop
        unpin_actor_parameters (bool): accepted from DeepSpeed-Chat, for its hybrid engine
        inference_tp_size (int): accepted from DeepSpeed-Chat, for its hybrid engine; rollouts use the processes that hold the model (--tensor_parallel_size)
        tp_gather_partition_size (int): accepted from DeepSpeed-Chat, for its hybrid engine
        enable_mixed_precision_lora (bool): accepted from DeepSpeed-Chat; --deepspeed_config sets quantised weights
        enable_tensorboard (bool): same as --report_to tensorboard
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
    actor_learning_rate: float | Literal['auto'] = 9.65e-06,
    actor_lora_alpha: float = 32.0,
    actor_use_rslora: bool = False,
    actor_expert_lora_dim: int | None = None,
    actor_expert_lora_alpha: float | None = None,
    actor_target_modules: str | Sequence[str] = ('all-linear',),
    actor_lora_learning_rate: float = 0.0005,
    actor_expert_learning_rate: float | None = None,
    actor_weight_decay: float = 0.0,
    actor_zero_stage: Literal[0, 1, 2, 3] | None = None,
    actor_gradient_checkpointing: bool | Literal['auto'] = 'auto',
    critic_lora_dim: int | None = None,
    critic_lora_alpha: float = 32.0,
    critic_use_rslora: bool = False,
    critic_expert_lora_dim: int | None = None,
    critic_expert_lora_alpha: float | None = None,
    critic_target_modules: str | Sequence[str] = ('all-linear',),
    critic_learning_rate: float | Literal['auto'] = 5e-06,
    critic_lora_learning_rate: float = 0.0005,
    critic_expert_learning_rate: float | None = None,
    critic_weight_decay: float = 0.0,
    critic_zero_stage: Literal[0, 1, 2, 3] | None = None,
    critic_gradient_checkpointing: bool | Literal['auto'] = 'auto',
    trust_remote_code: bool = False,
    add_eot_token: bool = False,
    eot_token: str = '<|endoftext|>',
    chat_template: str | None = None,
    max_prompt_seq_len: int = 256,
    max_answer_seq_len: int = 256,
    columns: Sequence[str] | Mapping[str, str] = (),
    eval_ratio: float = 0.05,
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
    num_prompts: int = 0,
    per_device_training_batch_size: int = 16,
    num_train_epochs: int = 1,
    max_steps: int = 0,
    gradient_accumulation_steps: int = 1,
    seed: int = 1234,
    num_warmup_steps: int = 0,
    lr_scheduler_type: Literal['linear', 'cosine', 'cosine_with_restarts', 'polynomial', 'constant', 'constant_with_warmup'] = 'cosine',
    tokens_per_device: int = 0,
    loraplus_lr_ratio: float = 1.0,
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.95,
    adam_epsilon: float = 1e-08,
    max_grad_norm: float = 1.0,
    enable_ema: bool = False,
    ema_decay: float = 0.992,
    only_optimize_lora: bool = True,
    per_device_generation_batch_size: int = 16,
    generation_batches: int = 1,
    temperature: float = 1.0,
    rollout_engine: Literal['own', 'vllm'] | str | object = 'own',
    max_num_seqs: int | Literal['auto'] = 'auto',
    num_generations: int | None = None,
    merge_for_rollouts: bool = False,
    refill_share: float | None = None,
    do_sample: bool = True,
    top_p: float = 1.0,
    top_k: int = 0,
    stop_tokens: str | Sequence[str] = (),
    stop_strings: str | Sequence[str] = (),
    environment: str | object | None = None,
    max_turns: int = 8,
    reward_weights: float | Sequence[float] = (),
    reward_batch: Literal['all', 'group'] = 'all',
    reward_retries: int = 0,
    reward_timeout: float = 0.0,
    clip_reward_value: float = 5.0,
    reward_scaling: Literal['none', 'running', 'initial'] = 'initial',
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
    dry_run: bool = False,
    verbose: bool = False,
    overwrite_output_dir: bool = False,
    save_interval: int = 500,
    merge_adapter: bool = False,
    accept_changed_data: bool = False,
    save_minutes: float = 10.0,
    save_total_limit: int = 3,
    merge_max_kl: float = 0.01,
    eval_interval: int = 0,
    eval_iters: int = 0,
    sample_generations: int = 2,
    judge_function: str | object | None = None,
    eval_prompts: int = 64,
    report_to: Literal['none', 'tensorboard', 'wandb', 'trackio'] | Sequence[Literal['none', 'tensorboard', 'wandb', 'trackio']] = ('none',),
    logging_steps: int = 1,
    log_rollouts: int = 128,
    print_answers: bool = False,
    print_answers_interval: int = 10,
    tensorboard_path: str | os.PathLike[str] | None = None,
    base_bits: Literal[16, 4] | None = None,
    zero_stage: Literal[0, 1, 2, 3] | None = None,
    deepspeed_config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    dtype: Literal['auto', 'fp32', 'bf16', 'fp16'] = 'auto',
    offload_activations: bool = False,
    offload: bool = False,
    tensor_parallel_size: int = 1,
    sequence_parallel: bool = False,
    context_parallel_size: int = 1,
    distributed_timeout: float = 120.0,
    attn_implementation: Literal['auto', 'sdpa', 'flex_attention', 'eager'] = 'auto',
    fused_kernels: Literal['auto', 'on', 'off'] = 'auto',
    compile: bool = False,
    training_graphs: Literal['auto', 'on', 'off'] = 'auto',
    release_inference_cache: bool = False,
    distill_loss: Literal['reverse_kl', 'forward_kl', 'jsd', 'sampled_reverse_kl'] = 'reverse_kl',
    teacher_system_prompt: str | None = None,
    on_policy_share: float = 1.0,
    teacher_bits: Literal[16, 4] | None = None,
    jsd_beta: float = 0.5,
    distill_top_k: int = 0,
    streaming: bool = False,
    shuffle_buffer_size: int = 10000,
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
    parts: Any | Sequence[Any] = (),
    guard: Literal['warn', 'stop', 'off'] = 'warn',
    kl_budget: float = 0.0,
    deepspeed: bool = False,
    print_loss: bool = False,
    actor_lora_module_name: str | None = None,
    actor_dropout: float = 0.0,
    critic_lora_module_name: str | None = None,
    critic_dropout: float = 0.0,
    compute_fp32_loss: bool = True,
    enable_test_mode: bool = False,
    test_stop_step: int = 0,
    num_padding_at_beginning: int = 1,
    align_overflow: bool = False,
    offload_reference_model: bool = False,
    offload_reward_model: bool = False,
    enable_hybrid_engine: bool = False,
    unpin_actor_parameters: bool = False,
    inference_tp_size: int = 1,
    tp_gather_partition_size: int = 8,
    enable_mixed_precision_lora: bool = False,
    enable_tensorboard: bool = False,
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

    Options:
        actor_lora_dim (int | None): LoRA rank of a new adapter; 0 trains all weights; default: 16 (training/ and --config: 0); an adapter that is trained further keeps its rank
        actor_learning_rate (float | Literal['auto']): peak learning rate of the adapter (default 5e-4) or of base weights; of the adapter if only it is trained, except in the script of training/; auto: by published rules for width and stage, for the adapter too
        actor_lora_alpha (float): LoRA alpha: the update is scaled by lora_alpha / lora_dim
        actor_use_rslora (bool): scale by lora_alpha / sqrt(lora_dim)
        actor_expert_lora_dim (int | None): LoRA rank of each MoE expert; 0 leaves experts frozen; default: lora_dim divided by the number of active experts per token, at least 1
        actor_expert_lora_alpha (float | None): LoRA alpha of MoE experts; default: lora_alpha
        actor_target_modules (str | Sequence[str]): layers to adapt: all-linear, name suffixes, or one regular expression
        actor_lora_learning_rate (float): peak learning rate of the adapter
        actor_expert_learning_rate (float | None): peak learning rate of the adapters of MoE experts; default: that of the adapter
        actor_weight_decay (float): decoupled weight decay, not applied to biases and norms
        actor_zero_stage (Literal[0, 1, 2, 3] | None): ZeRO stage of this role; default: --zero_stage
        actor_gradient_checkpointing (bool | Literal['auto']): recompute activations in the backward pass to save memory; auto: if they would not fit; without a value: on; auto uses an estimate, and on a GPU may split micro-batches instead if that is faster and their size is not given
        critic_lora_dim (int | None): LoRA rank of a new adapter; 0 trains all weights; default: 16 (training/ and --config: 0); an adapter that is trained further keeps its rank
        critic_lora_alpha (float): LoRA alpha: the update is scaled by lora_alpha / lora_dim
        critic_use_rslora (bool): scale by lora_alpha / sqrt(lora_dim)
        critic_expert_lora_dim (int | None): LoRA rank of each MoE expert; 0 leaves experts frozen; default: lora_dim divided by the number of active experts per token, at least 1
        critic_expert_lora_alpha (float | None): LoRA alpha of MoE experts; default: lora_alpha
        critic_target_modules (str | Sequence[str]): layers to adapt: all-linear, name suffixes, or one regular expression
        critic_learning_rate (float | Literal['auto']): peak learning rate of the adapter (default 5e-4) or of base weights; of the adapter if only it is trained, except in the script of training/; auto: by published rules for width and stage, for the adapter too
        critic_lora_learning_rate (float): peak learning rate of the adapter
        critic_expert_learning_rate (float | None): peak learning rate of the adapters of MoE experts; default: that of the adapter
        critic_weight_decay (float): decoupled weight decay, not applied to biases and norms
        critic_zero_stage (Literal[0, 1, 2, 3] | None): ZeRO stage of this role; default: --zero_stage
        critic_gradient_checkpointing (bool | Literal['auto']): recompute activations in the backward pass to save memory; auto: if they would not fit; without a value: on; auto uses an estimate, and on a GPU may split micro-batches instead if that is faster and their size is not given
        trust_remote_code (bool): allow running model code from a hub repository
        add_eot_token (bool): add --eot_token to the tokenizer and end every completion with it
        eot_token (str): end-of-text token that --add_eot_token adds
        chat_template (str | None): Jinja file with a chat template instead of the tokenizer's; saved with the model
        max_prompt_seq_len (int): maximum number of tokens of a prompt; --overlong applies to longer ones
        max_answer_seq_len (int): maximum number of tokens of a response
        columns (Sequence[str] | Mapping[str, str]): names of your columns, as in prompt=question completion=answer; here the prompt is read from the column question, in all data
        eval_ratio (float): fraction of the rows held out for evaluation if there is no --eval_data_path, in [0, 1)
        data_split_name (str | Sequence[str]): split of each --data_path that is a hub data set or a directory with splits, or one for all; default: train
        data_weights (float | Sequence[float]): how often each --data_path is used per epoch, in the same order; default: 1 each
        max_source_rows (int | Sequence[int]): use only the first N rows of each --data_path; one number for each, or one for all; 0: all
        max_repeats (int | Sequence[int]): maximum number of times a row of each --data_path is used in the whole run; one number for each, or one for all; 0: no limit
        data_split (str | None): proportions of the rows for steps 1, 2 and 3, such as 2,4,4; default: every step uses all rows
        data_output_path (str | os.PathLike[str] | None): cache directory for tokenized data; default: ~/.cache/dschat_lora
        overlong (Literal['split', 'drop', 'truncate', 'error']): what to do with samples longer than --max_seq_len: split cuts rows of `text` into pieces and drops other rows; drop drops all
        bad_rows (Literal['stop', 'skip']): what to do at an unusable row
        unpaired_rows (Literal['refuse', 'good_only', 'all']): what to do with answers that have a `label` (KTO rows): refuse to run, train only on those with label true, or train on all
        preprocessing_num_workers (int): number of processes that read and tokenize rows; 0: one per core, at most 16
        chat_template_kwargs (str | Mapping[str, Any] | None): JSON object of variables for the chat template, such as '{"enable_thinking": false}'; a column of this name in a row takes precedence
        num_prompts (int): number of episodes whose prompts an --environment class makes itself, instead of --data_path; reset receives the index of the episode, from 0, as `episode`
        per_device_training_batch_size (int): training batch size per device, in responses of one micro-batch
        num_train_epochs (int): number of training epochs; 0: evaluate only
        max_steps (int): number of optimizer steps; overrides --num_train_epochs; 0: by epochs
        gradient_accumulation_steps (int): micro-batches per optimizer step
        seed (int): random seed of initialisation, data order and sampling
        num_warmup_steps (int): number of optimizer steps of linear warm-up
        lr_scheduler_type (Literal['linear', 'cosine', 'cosine_with_restarts', 'polynomial', 'constant', 'constant_with_warmup']): type of learning-rate schedule
        tokens_per_device (int): maximum number of tokens per micro-batch and device, instead of a number of responses; 0: by responses
        loraplus_lr_ratio (float): LoRA+: ratio of the learning rates of lora_B and lora_A
        adam_beta1 (float): beta1 of AdamW
        adam_beta2 (float): beta2 of AdamW
        adam_epsilon (float): epsilon of AdamW
        max_grad_norm (float): maximum gradient norm for clipping; 0: no clipping
        enable_ema (bool): keep an exponential moving average of the actor, saved to actor_ema/
        ema_decay (float): decay of the moving average
        only_optimize_lora (bool): freeze base models that have an adapter (no-: also train them)
        per_device_generation_batch_size (int): generation batch size per device, in responses
        generation_batches (int): generation batches per iteration; if no batch size is given, as many as make 64 responses over all processes
        temperature (float): temperature of sampling and of all log-probabilities
        rollout_engine (Literal['own', 'vllm'] | str | object): engine that generates responses: own, vllm, servers or module:Class; vllm, which the run starts itself; the comma-separated addresses of servers (vLLM, SGLang or `dschat-lora serve`) that load adapters at run time, such as http://127.0.0.1:8000; or your own module:Class
        max_num_seqs (int | Literal['auto']): maximum number of responses decoded at a time per device; does not affect results; auto: as many as fit into free memory on a GPU, a generation batch on a CPU; auto is a generation batch for episodes
        num_generations (int | None): responses per prompt (8, or 1 if they are not compared); default: by --algorithm; at least 2, except for ppo and reinforce_pp, which do not compare them; 8, or a smaller divisor of --per_device_generation_batch_size
        merge_for_rollouts (bool): generate with the adapter merged into copies of the adapted weights: faster on a GPU, but takes their memory; 16-bit copies are rounded stochastically (by --seed), and the metric sampler_error shows the effect on the policy
        refill_share (float | None): fraction of the responses in decoding that must have finished before the next prompts of the iteration take their places; 0: each at once (0.25 on a GPU, 0 on a CPU)
        do_sample (bool): sample responses (no-: greedy decoding)
        top_p (float): sample from the most likely tokens with this total probability
        top_k (int): sample from this many most likely tokens; 0: all
        stop_tokens (str | Sequence[str]): further tokens that end a response, in addition to those of tokenizer, template and model
        stop_strings (str | Sequence[str]): strings that end a response at the token that completes them
        environment (str | object | None): environment that replies to the actor's turns: module:function, module:Class, or one from a library, such as gymnasium:ENV_ID; a function returns user or tool messages, or ends the episode; a class has reset, step or tools, and rewards; module:Player has play(tasks, draw, *, key), which generates the responses; libraries are gymnasium:ENV_ID, reasoning_gym:TASK, verifiers:TASKSET, openenv:URL, and mcp:COMMAND or mcp:URL, which provide tools
        max_turns (int): maximum number of actor turns in an episode of --environment, which share the length of one response
        reward_weights (float | Sequence[float]): weight of each reward in the sum of scores: those of a class in the order of its names, that of the reward model, if there is one, last; default: 1 each
        reward_batch (Literal['all', 'group']): responses per call: all of a process, or those to one prompt
        reward_retries (int): number of retries of a failed call to a reward function or environment
        reward_timeout (float): timeout in seconds of a call to a reward function or environment; 0: none
        clip_reward_value (float): clip scaled scores to this absolute value; 0: never
        reward_scaling (Literal['none', 'running', 'initial']): running: divide scores by their running standard deviation; initial: subtract the mean and divide by the standard deviation of the first iterations' scores (at least 64); the critic starts in these units (with none and running, in those of the reward model)
        missing_eos_penalty (float): penalty subtracted from the score of a truncated response
        soft_overlong_tokens (int): reduce the score linearly, by up to 1, over the last N tokens of --max_answer_seq_len (DAPO's soft overlong punishment; dapo: a fifth of them); 0: never
        ppo_epochs (int): number of passes over the responses of each iteration
        kl_coef (float | None): coefficient of the KL divergence from the reference (0.1 or 0); default: by --algorithm
        kl_estimator (Literal['k1', 'k2', 'k3'] | None): estimator of the KL divergence at each token; default: by --algorithm
        kl_in (Literal['reward', 'loss'] | None): where the KL penalty is applied: to the reward of each token, or in the loss; default: by --algorithm
        adaptive_kl_target (float): target KL divergence in nats per response, towards which kl_coef is adapted; 0: constant kl_coef
        kl_horizon (int): horizon in responses over which kl_coef adapts
        gamma (float): discount factor, in [0, 1]
        lam (float): lambda of generalized advantage estimation (GAE), in [0, 1]; below 1, the score at the end reaches a token t positions earlier with weight lam^t, and the critic's values account for the rest
        cliprange (float | None): clipping range of the probability ratio in both directions (0.2); default: by --algorithm
        cliprange_low (float | None): lower clipping range of the ratio; default: --cliprange; default: by --algorithm
        cliprange_high (float | None): upper clipping range of the ratio; default: --cliprange; default: by --algorithm
        dual_clip (float): dual clip: limit the loss of a token with negative advantage A to -A times this; 0: off
        sapo_temperature_pos (float): SAPO: temperature of the gate on tokens with positive advantage; a higher one restricts the ratio more
        sapo_temperature_neg (float): SAPO: temperature of the gate on all other tokens; normally above --sapo_temperature_pos
        loss_normalization (Literal['token', 'sequence', 'constant'] | None): how the loss is averaged; token: over all tokens; sequence: over responses; constant: divided by --max_answer_seq_len; default: by --algorithm
        mask_truncated_completions (bool | None): exclude truncated responses from the loss (DAPO's overlong filtering); default: by --algorithm
        dynamic_sampling (int | None): replace prompts whose responses all received the same reward, at most this many times per iteration (DAPO's dynamic sampling); 0: never; default: by --algorithm
        cliprange_value (float): clipping range of the value loss
        whiten_advantages (bool): normalize the advantages of each iteration to mean 0 and standard deviation 1
        critic_warmup_iterations (int): number of iterations at the start in which only the critic is trained
        importance_cap (float): maximum importance weight of a token in the policy loss: its probability under the policy over that under the sampling distribution (top-p, top-k, another temperature); 0: no weights; same as --rollout_correction tis with this --rollout_is_threshold
        rollout_correction (Literal['none', 'tis', 'mis'] | None): importance sampling in the policy loss if tokens are not sampled from the policy that is trained; tis: weights truncated at --rollout_is_threshold; mis: weights beyond it are set to 0; default: none with --rollout_engine own, else tis
        rollout_is (Literal['token', 'sequence']): level of the importance weights: one per token, or per response the product over its tokens
        rollout_is_threshold (float): upper threshold of the weights of --rollout_correction
        rollout_is_threshold_lower (float): lower threshold of the weights: tis raises lower ones to it, mis sets them to 0
        use_rollout_logprobs (bool): take old log-probabilities from the decode loop instead of a forward pass, which is faster; the metric sampler_error shows the rounding difference
        entropy_coef (float): coefficient of the entropy bonus
        target_kl (float): stop the updates of an iteration when the approximate KL divergence to the policy at its start exceeds this (mean nats per token); 0: never
        unsupervised_dataset_name (str | None): pretraining text to mix in: files, a directory or a hub data set (name:config)
        unsupervised_dataset_config_name (str | None): configuration of a hub data set, as in name:configuration
        unsup_coef (float): coefficient of the pretraining loss per token, relative to the policy loss
        dry_run (bool): check options and data, print what the run would do, and exit
        verbose (bool): with --dry_run: list all options
        overwrite_output_dir (bool): overwrite the files of an earlier run in --output_dir
        save_interval (int): optimizer steps between checkpoints; 0: by time only
        merge_adapter (bool): also save the adapter merged into the base, as a transformers model
        accept_changed_data (bool): with --resume_from_checkpoint: resume even if the data has changed since the checkpoint, or cannot be compared
        save_minutes (float): maximum minutes between checkpoints; 0: by steps only
        save_total_limit (int): number of newest checkpoints to keep; 0: all
        merge_max_kl (float): refuse a merge that changes the output distribution by more than this KL divergence (nats per token)
        eval_interval (int): optimizer steps between evaluations; 0: at the start, each epoch and the end
        eval_iters (int): maximum number of evaluation batches per device; 0: all
        sample_generations (int): number of held-out prompts answered before and after training
        judge_function (str | object | None): module:function that scores held-out responses in evaluations, never in training
        eval_prompts (int): number of held-out prompts answered in each evaluation, greedily and by sampling; 0: none, and none are held out unless --eval_ratio is given
        report_to (Literal['none', 'tensorboard', 'wandb', 'trackio'] | Sequence[Literal['none', 'tensorboard', 'wandb', 'trackio']]): trackers to which metrics are also reported; one or several; their own variables, such as WANDB_MODE=offline, apply
        logging_steps (int): optimizer steps between logged lines
        log_rollouts (int): number of responses per iteration logged to rollouts.jsonl.gz; 0: none
        print_answers (bool): print a response at every iteration
        print_answers_interval (int): iterations between printed responses; 0: never
        tensorboard_path (str | os.PathLike[str] | None): directory for TensorBoard files; default: OUTPUT_DIR/tensorboard
        base_bits (Literal[16, 4] | None): bits of the frozen base weights: 16, or 4 (QLoRA); default: those the loaded adapter was trained with, else 16; 4 is NF4, for linear layers and experts of the transformer blocks
        zero_stage (Literal[0, 1, 2, 3] | None): ZeRO stage: 1 shards optimizer states over processes, 2 also gradients, 3 also weights; default: 0; or that of --deepspeed_config
        deepspeed_config (str | os.PathLike[str] | Mapping[str, Any] | None): DeepSpeed JSON such as configs/ds/zero2.json; "auto" fields are filled in
        dtype (Literal['auto', 'fp32', 'bf16', 'fp16']): compute dtype; auto: bf16 on GPUs that support it, fp16 on older GPUs, fp32 on CPU
        offload_activations (bool): offload the checkpointed activations to pinned host memory until the backward pass; turns --gradient_checkpointing auto on
        offload (bool): offload optimizer states (and, at stage 3, weights) to host memory
        tensor_parallel_size (int): number of processes over which each layer is split; they process the same data
        sequence_parallel (bool): with --tensor_parallel_size above 1: split the activations between layers by tokens
        context_parallel_size (int): SFT, reward, DPO: number of processes over which the tokens of each row are split, for long rows; attention stays exact over the whole row
        distributed_timeout (float): seconds without a sign of life from a process after which the run ends (at least 300 until the first step is done)
        attn_implementation (Literal['auto', 'sdpa', 'flex_attention', 'eager']): attention implementation; auto: sdpa if the architecture supports it, else eager; sdpa computes the sequences of a packed row separately if it can; flex_attention is for GPUs if it cannot
        fused_kernels (Literal['auto', 'on', 'off']): use fused kernels for RMSNorm, SwiGLU and rotary embeddings if they match the architecture's own; auto: on a GPU
        compile (bool): compile the transformer blocks with torch.compile: slower start, faster steps
        training_graphs (Literal['auto', 'on', 'off']): replay the forward and backward pass below the head as CUDA graphs; auto: if launching kernels would take longer than running them; micro-batches are padded to a few shapes; needs ZeRO 0 and no dropout
        release_inference_cache (bool): free the KV cache before each update (default: keep it if the GPU has room for it)
        distill_loss (Literal['reverse_kl', 'forward_kl', 'jsd', 'sampled_reverse_kl']): divergence from the teacher; per token over the whole vocabulary: reverse_kl, forward_kl or jsd (generalised, GKD); or sampled_reverse_kl, estimated from the sampled tokens and used as their advantage
        teacher_system_prompt (str | None): system message put before each prompt for the teacher, but not for the actor
        on_policy_share (float): fraction of the responses that the actor generates, in [0, 1]; the others are completions from the data (GKD's lambda)
        teacher_bits (Literal[16, 4] | None): bits of the teacher's base, 16 or 4 (NF4); default: as for --base_bits
        jsd_beta (float): interpolation coefficient of --distill_loss jsd: the teacher's weight in the mixture, in (0, 1)
        distill_top_k (int): number of the teacher's most likely tokens over which the divergence is computed; all others are treated as one token; 0: the whole vocabulary
        streaming (bool): read, tokenize and pack rows during training, in bounded memory, instead of preparing all of them first; needs --max_steps
        shuffle_buffer_size (int): number of rows that --streaming shuffles and packs at a time; the order of shards is shuffled too
        vllm_command (str | None): command that starts the server of --rollout_engine vllm, such as `/envs/vllm/bin/vllm serve` for vLLM in another environment, with further options if needed; default: `vllm serve`
        vllm_gpu_memory_utilization (float): fraction of GPU memory (of host memory without a GPU) that --rollout_engine vllm uses while it generates; on a GPU it sleeps during training
        rollout_adapter_dir (str | os.PathLike[str] | None): directory, shared with the servers of --rollout_engine, from which they load the adapter; default: one in memory, for servers on this machine
        rollout_timeout (float): timeout in seconds for a response of a rollout or teacher server, and for vllm to start
        rollouts_ahead (int): number of iterations that the servers of --rollout_engine generate ahead of training, with an adapter at most this many iterations old; --rollout_correction corrects for it; 0: synchronous
        agent (str | object | None): module:function that runs an episode: it receives the row and an openai client connected to the actor, may call it any number of times, and returns the reward
        agent_command (str | None): command that runs an episode: it reads the row from standard input, reaches the actor at OPENAI_BASE_URL, and prints the reward on its last line
        agent_timeout (float): time limit of an agent's episode in seconds, not counting the time the actor takes to answer
        agent_retries (int): number of retries of an agent's episode that failed
        agent_max_calls (int): maximum number of actor responses in an agent's episode
        parts (Any | Sequence[Any]): one or more module:Class whose objects are called after every step and iteration (after_step, after_iteration), for your own metrics, logs and coefficients
        guard (Literal['warn', 'stop', 'off']): what to do when the entropy collapses, responses double or halve in length or stop ending, the reward rises while the judge's or the held-out reward falls, or --kl_budget is exceeded: warn, stop with a checkpoint, or nothing (off)
        kl_budget (float): KL divergence from the reference that --guard allows, in nats per response; 0: no limit
        deepspeed (bool): accepted from DeepSpeed, which is always used
        print_loss (bool): print the loss at every optimizer step
        actor_lora_module_name (str | None): adapt the linear layers whose name contains this (DeepSpeed-Chat's rule)
        actor_dropout (float): accepted from DeepSpeed-Chat; old and new log-probabilities need one network
        critic_lora_module_name (str | None): adapt the linear layers whose name contains this (DeepSpeed-Chat's rule)
        critic_dropout (float): accepted from DeepSpeed-Chat; old and new log-probabilities need one network
        compute_fp32_loss (bool): accepted from DeepSpeed-Chat; the loss is always computed in fp32
        enable_test_mode (bool): stop after --test_stop_step optimizer steps
        test_stop_step (int): number of optimizer steps of --enable_test_mode
        num_padding_at_beginning (int): accepted from DeepSpeed-Chat; nothing is inferred from padding
        align_overflow (bool): accepted from DeepSpeed-Chat; a non-finite loss skips both steps
        offload_reference_model (bool): accepted from DeepSpeed-Chat; the reference shares the actor's base
        offload_reward_model (bool): accepted from DeepSpeed-Chat; the reward model shares the critic's base
        enable_hybrid_engine (bool): accepted from DeepSpeed-Chat; rollouts have their own decode loop
        unpin_actor_parameters (bool): accepted from DeepSpeed-Chat, for its hybrid engine
        inference_tp_size (int): accepted from DeepSpeed-Chat, for its hybrid engine; rollouts use the processes that hold the model (--tensor_parallel_size)
        tp_gather_partition_size (int): accepted from DeepSpeed-Chat, for its hybrid engine
        enable_mixed_precision_lora (bool): accepted from DeepSpeed-Chat; --deepspeed_config sets quantised weights
        enable_tensorboard (bool): same as --report_to tensorboard
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
    do_sample: bool = False,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    num_return_sequences: int = 1,
    allow_image_urls: bool = False,
    max_image_pixels: int = 50000000,
    image: str | Sequence[str] = (),
) -> list[str]:
    """Answers to prompts, greedily unless told otherwise.

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
        base_bits (Literal[16, 4] | None): bits of the base weights: 16, or 4 (NF4); default: as the adapter was trained
        max_seq_len (int): maximum sequence length in tokens; 0: the model's number of positions
        columns (Sequence[str] | Mapping[str, str]): names of columns, as in prompt=question completion=answer
        seed (int): random seed of sampling
        dtype (Literal['auto', 'fp32', 'bf16', 'fp16']): compute dtype; auto: as in training
        per_device_eval_batch_size (int): batch size
        attn_implementation (Literal['auto', 'sdpa', 'eager']): attention implementation of transformers; auto: sdpa if the model supports it, else eager
        trust_remote_code (bool): allow running model code from a hub repository
        chat_template (str | None): Jinja file with a chat template, instead of the tokenizer's own
        chat_template_kwargs (str | Mapping[str, Any] | None): JSON object of variables for the chat template, as in training
        chat (bool): send --prompts as user messages through the chat template
        max_new_tokens (int): maximum number of tokens of an answer
        do_sample (bool): sample tokens instead of greedy decoding
        temperature (float): sampling temperature, with --do_sample
        top_p (float): sample from the most likely tokens with this total probability
        top_k (int): sample from this many most likely tokens; 0: all
        num_return_sequences (int): number of answers per prompt, with --do_sample
        allow_image_urls (bool): download images whose rows give http(s) addresses
        max_image_pixels (int): maximum number of pixels of an image; larger ones are rejected before decoding
        image (str | Sequence[str]): image files placed before each of --prompts, or at its <image> placeholders
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
        base_bits (Literal[16, 4] | None): bits of the base weights: 16, or 4 (NF4); default: as the adapter was trained
        max_seq_len (int): maximum sequence length in tokens; 0: the model's number of positions
        columns (Sequence[str] | Mapping[str, str]): names of columns, as in prompt=question completion=answer
        dtype (Literal['auto', 'fp32', 'bf16', 'fp16']): compute dtype; auto: as in training
        per_device_eval_batch_size (int): batch size
        attn_implementation (Literal['auto', 'sdpa', 'eager']): attention implementation of transformers; auto: sdpa if the model supports it, else eager
        trust_remote_code (bool): allow running model code from a hub repository
        chat_template (str | None): Jinja file with a chat template, instead of the tokenizer's own
        chat_template_kwargs (str | Mapping[str, Any] | None): JSON object of variables for the chat template, as in training
        reward_model (Model | None): reward model that scores the model's greedy answers to the prompts
        judge_function (str | object | None): module:function that scores the same answers, as a reward function of step 3; builtin:NAME for a bundled one
        max_new_tokens (int): maximum number of tokens of such an answer
        limit (int): evaluate only the first N rows, or the first N of each task; 0: all
        tasks (str | Sequence[str]): tasks of lm-evaluation-harness, or directories with your own task files, instead of rows; needs dschat_lora[evaluation]
        num_fewshot (int | None): number of few-shot examples before each question of --tasks; default: the task's own
        apply_chat_template (bool): send the questions of --tasks as user messages through the chat template
        allow_image_urls (bool): download images whose rows give http(s) addresses
        max_image_pixels (int): maximum number of pixels of an image; larger ones are rejected before decoding
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
        ValueError: if there is no adapter, or rounding moves the model by too much.

    Options:
        base_bits (Literal[16, 4] | None): bits of the base that the adapter is merged into: 16, or 4 (NF4); default: those it was trained on; the merged weights are never quantised
        dtype (Literal['auto', 'fp32', 'bf16', 'fp16']): dtype of the saved weights; auto: that of the base if it has 16 bits, else bf16
        overwrite_output_dir (bool): overwrite a model in the output directory
        merge_max_kl (float): refuse a merge that changes the output distribution by more than this KL divergence (nats per token)
        trust_remote_code (bool): allow running model code from a hub repository
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
    show: int = 0,
    stage: Literal['sft', 'reward', 'dpo', 'rlhf', 'distill'] = 'sft',
    seed: int = 1234,
    chat_template: str | None = None,
    trust_remote_code: bool = False,
    add_eot_token: bool = False,
    eot_token: str = '<|endoftext|>',
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

    Options:
        max_seq_len (int): maximum number of tokens per row, prompt and completion together
        columns (Sequence[str] | Mapping[str, str]): names of your columns, as in prompt=question completion=answer; here the prompt is read from the column question, in all data
        eval_data_path (str | os.PathLike[str] | Sequence[str | os.PathLike[str]]): evaluation data, never trained on
        packing (bool): pack several samples into rows of --max_seq_len; attention does not cross samples
        eval_ratio (float): fraction of the rows held out for evaluation if there is no --eval_data_path, in [0, 1)
        data_split_name (str | Sequence[str]): split of each --data_path that is a hub data set or a directory with splits, or one for all; default: train
        data_weights (float | Sequence[float]): how often each --data_path is used per epoch, in the same order; default: 1 each
        max_source_rows (int | Sequence[int]): use only the first N rows of each --data_path; one number for each, or one for all; 0: all
        max_repeats (int | Sequence[int]): maximum number of times a row of each --data_path is used in the whole run; one number for each, or one for all; 0: no limit
        data_split (str | None): proportions of the rows for steps 1, 2 and 3, such as 2,4,4; default: every step uses all rows
        data_output_path (str | os.PathLike[str] | None): cache directory for tokenized data; default: ~/.cache/dschat_lora
        overlong (Literal['split', 'drop', 'truncate', 'error']): what to do with samples longer than --max_seq_len: split cuts rows of `text` into pieces and drops other rows; drop drops all
        bad_rows (Literal['stop', 'skip']): what to do at an unusable row
        unpaired_rows (Literal['refuse', 'good_only', 'all']): what to do with answers that have a `label` (KTO rows): refuse to run, train only on those with label true, or train on all
        preprocessing_num_workers (int): number of processes that read and tokenize rows; 0: one per core, at most 16
        chat_template_kwargs (str | Mapping[str, Any] | None): JSON object of variables for the chat template, such as '{"enable_thinking": false}'; a column of this name in a row takes precedence
        sft_only_data_path (str | os.PathLike[str] | Sequence[str | os.PathLike[str]]): further data, used in full in step 1 only
        train_on_prompt (bool): compute the loss on the prompt too, also in evaluation (as DeepSpeed-Chat does, and microsoft/LoRA with --obj jlm)
        train_empty_think (bool): train on the empty thought that a chat template adds to answers without one, such as Qwen3's <think></think>, which teaches the model not to think
        show (int): number of samples to show token by token, with the supervised tokens marked
        stage (Literal['sft', 'reward', 'dpo', 'rlhf', 'distill']): stage for which rows are prepared: as sequences, pairs, or prompts of step 3
        seed (int): random seed of --data_split and --eval_ratio
        chat_template (str | None): Jinja file with a chat template, as in training
        trust_remote_code (bool): allow running tokenizer code from a hub repository
        add_eot_token (bool): as in training
        eot_token (str): as in training
        near_duplicates (float | None): count near duplicates: rows whose word 5-grams have at least this Jaccard similarity to those of an earlier row, in (0, 1], such as 0.8
        against (str | Sequence[str]): count contaminated rows: those that share --against_ngram consecutive words with this evaluation data, named as in --data_path
        against_ngram (int): n-gram size of --against, in words; shorter texts are compared as a whole
        language_rows (int): number of random rows whose language is detected; 0: none; 1000 is usually enough
        kept_path (str | os.PathLike[str] | None): .jsonl file to write the usable rows to, without duplicates and, if they are counted, near duplicates and rows that overlap with --against
        overwrite_kept_path (bool): overwrite an existing file at --kept_path
        streaming (bool): read, tokenize and pack rows during training, in bounded memory, instead of preparing all of them first; needs --max_steps
        shuffle_buffer_size (int): number of rows that --streaming shuffles and packs at a time; the order of shards is shuffled too
        allow_image_urls (bool): download images whose rows give http(s) addresses
        max_image_pixels (int): maximum number of pixels of an image; larger ones are rejected before decoding
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
            trust_remote_code (bool): allow running model code from a hub repository
            add_eot_token (bool): add --eot_token to the tokenizer and end every completion with it
            eot_token (str): end-of-text token that --add_eot_token adds
            chat_template (str | None): Jinja file with a chat template instead of the tokenizer's; saved with the model
            dropout (float): dropout probability of the base model (all its dropout layers), in [0, 1)
            rope_scaling (str | None): JSON object that extends rotary position embeddings to longer rows, as in transformers, such as '{"rope_type": "yarn", "factor": 4.0}' (or linear, llama3); default: that of the loaded adapter's training, else the model's own
            per_device_train_batch_size (int): training batch size per device, in rows; of one micro-batch; a packed row holds several samples
            seed (int): random seed of initialisation, data order and sampling
            loraplus_lr_ratio (float): LoRA+: ratio of the learning rates of lora_B and lora_A
            adam_beta1 (float): beta1 of AdamW
            adam_beta2 (float): beta2 of AdamW
            adam_epsilon (float): epsilon of AdamW
            max_grad_norm (float): maximum gradient norm for clipping; 0: no clipping
            weight_decay (float): decoupled weight decay, not applied to biases and norms
            lora_dim (int | None): LoRA rank; 0 trains all weights; default: 16 (training/ and --config: 0); an adapter that is trained further keeps its rank
            lora_alpha (float): LoRA alpha: the update is scaled by lora_alpha / lora_dim
            target_modules (str | Sequence[str]): layers to adapt: all-linear, name suffixes, or one regular expression
            lora_dropout (float): dropout on the adapter's input, in [0, 1)
            use_rslora (bool): scale the update by lora_alpha / sqrt(lora_dim) (rank-stabilised LoRA)
            train_bias (Literal['none', 'all', 'lora_only']): biases to train: none, all, or those of adapted layers (lora_only)
            modules_to_save (str | Sequence[str]): name suffixes of modules to train in full and save with the adapter
            enable_lora (str | Sequence[str]): parts (q, k, v) of a packed projection that get their own lora_A and lora_B; default: one pair for the whole layer
            expert_lora_dim (int | None): LoRA rank of each MoE expert; 0 leaves experts frozen; default: lora_dim divided by the number of active experts per token, at least 1
            expert_lora_alpha (float | None): LoRA alpha of MoE experts; default: lora_alpha
            only_optimize_lora (bool): freeze the base model when lora_dim > 0 (no-: also train it)
            per_device_eval_batch_size (int): evaluation batch size per device
            base_bits (Literal[16, 4] | None): bits of the frozen base weights: 16, or 4 (QLoRA); default: those the loaded adapter was trained with, else 16; 4 is NF4, for linear layers and experts of the transformer blocks
            zero_stage (Literal[0, 1, 2, 3] | None): ZeRO stage: 1 shards optimizer states over processes, 2 also gradients, 3 also weights; default: 0; or that of --deepspeed_config
            gradient_checkpointing (bool | Literal['auto']): recompute activations in the backward pass to save memory; auto: if they would not fit; without a value: on; auto uses an estimate, and on a GPU may split micro-batches instead if that is faster and their size is not given
            deepspeed_config (str | os.PathLike[str] | Mapping[str, Any] | None): DeepSpeed JSON such as configs/ds/zero2.json; "auto" fields are filled in
            dtype (Literal['auto', 'fp32', 'bf16', 'fp16']): compute dtype; auto: bf16 on GPUs that support it, fp16 on older GPUs, fp32 on CPU
            offload_activations (bool): offload the checkpointed activations to pinned host memory until the backward pass; turns --gradient_checkpointing auto on
            offload (bool): offload optimizer states (and, at stage 3, weights) to host memory
            tensor_parallel_size (int): number of processes over which each layer is split; they process the same data
            sequence_parallel (bool): with --tensor_parallel_size above 1: split the activations between layers by tokens
            distributed_timeout (float): seconds without a sign of life from a process after which the run ends (at least 300 until the first step is done)
            attn_implementation (Literal['auto', 'sdpa', 'flex_attention', 'eager']): attention implementation; auto: sdpa if the architecture supports it, else eager; sdpa computes the sequences of a packed row separately if it can; flex_attention is for GPUs if it cannot
            lora_module_name (str | None): adapt the linear layers whose name contains this (DeepSpeed-Chat's rule)
        """
