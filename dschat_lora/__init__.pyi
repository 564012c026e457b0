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
        trust_remote_code (bool): run model code that comes with a hub repository
        add_eot_token (bool): add --eot_token to the tokenizer and end every completion with it
        eot_token (str): end-of-text token of --add_eot_token
        chat_template (str | None): Jinja file that renders messages, in place of the tokenizer's own; saved with the result
        dropout (float): every dropout probability of the base model, in [0, 1)
        router_aux_loss_coef (float): SFT's loss grows by this times the load-balancing loss that the model has for its experts; 0: without
        rope_scaling (str | None): JSON object by which rotary position embeddings reach longer rows, in transformers' words, such as '{"rope_type": "yarn", "factor": 4.0}' (or linear, llama3); default: that with which the adapter that is loaded was trained, else the model's own
        neftune_noise_alpha (float): SFT: uniform noise of up to this / sqrt(L d) on the embeddings in training (NEFTune; 5 to 15), L the tokens of a sequence and d the width; 0: none
        max_seq_len (int): tokens per row, prompt and completion together
        columns (Sequence[str] | Mapping[str, str]): names of your columns, as in prompt=question completion=answer; with these the prompt is read from the column question, in all data
        packing (bool): fill rows of --max_seq_len with several samples; the mask keeps them apart
        eval_ratio (float): held-out share of the rows where no --eval_data_path is given, in [0, 1)
        data_split_name (str | Sequence[str]): split of each --data_path that is a hub data set or a directory with splits, or one for all; train when absent
        data_weights (float | Sequence[float]): times each --data_path is used per epoch, in its order; 1 each when absent
        max_source_rows (int | Sequence[int]): most rows of each --data_path, its first ones, or one number for all; 0: all
        max_repeats (int | Sequence[int]): times that a row of each --data_path may be used in the whole run at most, or one number for all; 0 or absent: no bound
        data_split (str | None): shares of the rows for steps 1, 2 and 3, such as 2,4,4; every step uses all rows when absent
        data_output_path (str | os.PathLike[str] | None): cache of tokenised data; default ~/.cache/dschat_lora
        overlong (Literal['split', 'drop', 'truncate', 'error']): what happens to samples longer than --max_seq_len: split cuts rows of `text` into pieces and drops others, drop drops all
        bad_rows (Literal['stop', 'skip']): what happens at a row that cannot be used
        unpaired_rows (Literal['refuse', 'good_only', 'all']): what is learnt of answers with a `label` (rows for KTO): nothing (the run stops), those with label true, or all, whatever the label
        preprocessing_num_workers (int): processes that read and tokenise rows; 0: one for each core, at most 16
        chat_template_kwargs (str | Mapping[str, Any] | None): JSON object of variables for the chat template, such as '{"enable_thinking": false}'; a row's column of this name comes first
        sft_only_data_path (str | os.PathLike[str] | Sequence[str | os.PathLike[str]]): further data used whole in step 1 and in no other step
        train_on_prompt (bool): take the loss on the prompt too, in evaluation as well (as DeepSpeed-Chat, and microsoft/LoRA by --obj jlm)
        train_empty_think (bool): learn the empty thought that a chat template writes for an answer without one, as Qwen3's <think></think>, which teaches not to think
        learning_rate (float | Literal['auto']): peak rate of adapters (unless given 5e-4, DPO 1e-5) or of base weights; of adapters where they alone train, but in the scripts of training/; auto: by published rules for width and stage, that of adapters too
        num_train_epochs (int): passes over data; 0 evaluates only
        max_steps (int): optimizer steps to train for, whatever the epochs; 0: by epochs
        per_device_train_batch_size (int): rows per device and micro-batch; of several samples if packed, else of one
        gradient_accumulation_steps (int): micro-batches per optimizer step
        seed (int): seed of initialisation, order and sampling
        num_warmup_steps (int): optimizer steps of linear warm-up
        lr_scheduler_type (Literal['linear', 'cosine', 'cosine_with_restarts', 'polynomial', 'constant', 'constant_with_warmup']): shape of the rate over the steps
        tokens_per_device (int): tokens per device and micro-batch, instead of a number of rows; 0: by rows
        lora_learning_rate (float | None): peak rate of the adapters; default: --learning_rate if given, 5e-4, DPO 1e-5
        lora_lr_multiplier (float | None): adapters train at this multiple of --learning_rate; measured best: about 10, up to 15 in runs of 100 steps; to be cautious: 2 to 3
        loraplus_lr_ratio (float): rate of lora_B over that of lora_A (LoRA+); 1 treats them alike
        adam_beta1 (float): decay of the gradient's mean
        adam_beta2 (float): decay of the gradient's square
        adam_epsilon (float): added to the root of the second moment
        max_grad_norm (float): gradients are clipped to this norm; 0: never
        expert_learning_rate (float | None): peak rate of experts' adapters in a mixture; default: that of the adapters
        weight_decay (float): decoupled weight decay; biases and norms exempt
        early_stopping_patience (int): end the run once this many evaluations in a row had no lower held-out loss than the lowest before; 0: never
        lora_dim (int | None): rank of the adapters; 0 trains every weight; default: 16 (training/ and --config: 0); the 0 is of the scripts of training/; by default an adapter that is continued keeps its rank
        lora_alpha (float): the update is scaled by lora_alpha / lora_dim
        target_modules (str | Sequence[str]): layers to adapt: all-linear, name endings, or one regular expression
        lora_dropout (float): dropout on the adapter's input, in [0, 1)
        use_rslora (bool): scale by lora_alpha / sqrt(lora_dim) (rank-stabilised LoRA)
        train_bias (Literal['none', 'all', 'lora_only']): biases to train: none, all, or those of adapted layers
        modules_to_save (str | Sequence[str]): name endings of modules to train in full and save with the adapter
        enable_lora (str | Sequence[str]): q, k, v: the parts of a packed projection that get factors of their own; the layer has one pair for all of it when absent
        expert_lora_dim (int | None): rank of each expert's update in a mixture of experts; 0 leaves experts frozen; default: lora_dim over the experts that a token is sent to, at least 1
        expert_lora_alpha (float | None): the update of an expert is scaled by this over its rank; default: lora_alpha
        only_optimize_lora (bool): freeze the base model when lora_dim > 0 (no-: train it too)
        dry_run (bool): check everything but the weights, say what the run would do, and stop
        verbose (bool): with --dry_run: list all options
        overwrite_output_dir (bool): delete what an earlier run left in --output_dir
        save_interval (int): optimizer steps between checkpoints; 0: by time only
        merge_adapter (bool): also write base and adapter merged as a transformers model
        accept_changed_data (bool): with --resume_from_checkpoint: go on where the data are not those of the checkpoint, or cannot be compared with them
        save_minutes (float): a checkpoint at least this often; 0: by steps only
        save_total_limit (int): newest checkpoints that are kept; 0: all
        merge_max_kl (float): refuse a merge that moves the distribution by more (nats per token)
        eval_interval (int): optimizer steps between evaluations; 0: at the start, each epoch and the end
        eval_iters (int): evaluation batches per device; 0: all
        sample_generations (int): held-out prompts answered before and after training
        per_device_eval_batch_size (int): rows per device in evaluation
        report_to (Literal['none', 'tensorboard', 'wandb', 'trackio'] | Sequence[Literal['none', 'tensorboard', 'wandb', 'trackio']]): trackers that get the numbers of metrics.jsonl too; one or several; their own variables, such as WANDB_MODE=offline, apply
        logging_steps (int): optimizer steps between printed lines
        tensorboard_path (str | os.PathLike[str] | None): directory of TensorBoard files; default OUTPUT_DIR/tensorboard
        base_bits (Literal[16, 4] | None): bits of the frozen base: 16, or 4 (QLoRA); default: the loaded adapter's, else 16; 4 is NF4, for linear layers and experts of the blocks; an adapter's are those with which it was trained
        zero_stage (Literal[0, 1, 2, 3] | None): ZeRO: 1 shards optimizer state, 2 gradients too, 3 weights too; default: 0; over processes; default: what --deepspeed_config says, where it is given
        gradient_checkpointing (bool | Literal['auto']): recompute activations to save memory; auto: where they would not fit; in the backward pass, instead of keeping them; without a value on; auto goes by an estimate, and on a GPU divides micro-batches whose size is not given, where that is faster
        deepspeed_config (str | os.PathLike[str] | Mapping[str, Any] | None): DeepSpeed JSON such as configs/ds/zero2.json; "auto" fields are filled in
        dtype (Literal['auto', 'fp32', 'bf16', 'fp16']): compute type; auto: bf16 where the GPU has it, fp16 on older GPUs, fp32 on CPU
        offload_activations (bool): keep the inputs of recomputed blocks in pinned host memory until the backward pass wants them; turns --gradient_checkpointing auto on
        offload (bool): keep optimizer state (and, at stage 3, weights) in host memory
        tensor_parallel_size (int): processes that hold one model between them, each a part of every layer; they see the same data
        sequence_parallel (bool): with --tensor_parallel_size above 1: between the layers each process keeps its share of the tokens alone
        context_parallel_size (int): SFT, reward, DPO: processes that divide the tokens of each row among them, for long rows; attention is exact over the whole of it
        distributed_timeout (float): seconds after which a process that is not heard of ends the run (300 at least until the first step is over)
        attn_implementation (Literal['auto', 'sdpa', 'flex_attention', 'eager']): attention kernel; auto: sdpa where the architecture has it, else eager; sdpa computes each sequence of a row alone where it can, flex_attention is for GPUs where it cannot
        fused_kernels (Literal['auto', 'on', 'off']): compute RMSNorm, SwiGLU and rotary embeddings by fewer kernels, where the architecture's are found equal to them; auto: on a GPU
        compile (bool): compile the model's blocks (torch.compile): slow to start, faster from then on
        training_graphs (Literal['auto', 'on', 'off']): replay the passes of training below the head as CUDA graphs; auto: where launching kernels would take longer than their work; micro-batches are padded to a few shapes; at ZeRO 0, without dropout
        eval_tasks (str | Sequence[str]): SFT and DPO: tasks of lm-evaluation-harness, or directories of task files, measured at each evaluation; needs dschat_lora[evaluation]
        eval_tasks_limit (int): questions of each of --eval_tasks at most; 0: all
        streaming (bool): read, tokenise and pack rows while training, at bounded memory, in place of preparing all of them before; needs --max_steps
        shuffle_buffer_size (int): rows that --streaming shuffles and packs at a time, besides shards' order
        allow_image_urls (bool): read pictures of rows from the network where they are http(s) addresses
        max_image_pixels (int): most pixels of a picture, which is refused before it is decoded
        train_vision (bool): adapt the linear layers of the part that sees and of its projector, too
        vision_learning_rate (float | None): rate of adapters there, by --train_vision or --target_modules; default: as others
        deepspeed (bool): accepted from DeepSpeed; it is always used
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
        trust_remote_code (bool): run model code that comes with a hub repository
        add_eot_token (bool): add --eot_token to the tokenizer and end every completion with it
        eot_token (str): end-of-text token of --add_eot_token
        chat_template (str | None): Jinja file that renders messages, in place of the tokenizer's own; saved with the result
        dropout (float): every dropout probability of the base model, in [0, 1)
        router_aux_loss_coef (float): SFT's loss grows by this times the load-balancing loss that the model has for its experts; 0: without
        rope_scaling (str | None): JSON object by which rotary position embeddings reach longer rows, in transformers' words, such as '{"rope_type": "yarn", "factor": 4.0}' (or linear, llama3); default: that with which the adapter that is loaded was trained, else the model's own
        neftune_noise_alpha (float): SFT: uniform noise of up to this / sqrt(L d) on the embeddings in training (NEFTune; 5 to 15), L the tokens of a sequence and d the width; 0: none
        max_seq_len (int): tokens per row, prompt and completion together
        columns (Sequence[str] | Mapping[str, str]): names of your columns, as in prompt=question completion=answer; with these the prompt is read from the column question, in all data
        packing (bool): fill rows of --max_seq_len with several samples; the mask keeps them apart
        eval_ratio (float): held-out share of the rows where no --eval_data_path is given, in [0, 1)
        data_split_name (str | Sequence[str]): split of each --data_path that is a hub data set or a directory with splits, or one for all; train when absent
        data_weights (float | Sequence[float]): times each --data_path is used per epoch, in its order; 1 each when absent
        max_source_rows (int | Sequence[int]): most rows of each --data_path, its first ones, or one number for all; 0: all
        max_repeats (int | Sequence[int]): times that a row of each --data_path may be used in the whole run at most, or one number for all; 0 or absent: no bound
        data_split (str | None): shares of the rows for steps 1, 2 and 3, such as 2,4,4; every step uses all rows when absent
        data_output_path (str | os.PathLike[str] | None): cache of tokenised data; default ~/.cache/dschat_lora
        overlong (Literal['split', 'drop', 'truncate', 'error']): what happens to samples longer than --max_seq_len: split cuts rows of `text` into pieces and drops others, drop drops all
        bad_rows (Literal['stop', 'skip']): what happens at a row that cannot be used
        unpaired_rows (Literal['refuse', 'good_only', 'all']): what is learnt of answers with a `label` (rows for KTO): nothing (the run stops), those with label true, or all, whatever the label
        preprocessing_num_workers (int): processes that read and tokenise rows; 0: one for each core, at most 16
        chat_template_kwargs (str | Mapping[str, Any] | None): JSON object of variables for the chat template, such as '{"enable_thinking": false}'; a row's column of this name comes first
        sft_only_data_path (str | os.PathLike[str] | Sequence[str | os.PathLike[str]]): further data used whole in step 1 and in no other step
        train_on_prompt (bool): take the loss on the prompt too, in evaluation as well (as DeepSpeed-Chat, and microsoft/LoRA by --obj jlm)
        train_empty_think (bool): learn the empty thought that a chat template writes for an answer without one, as Qwen3's <think></think>, which teaches not to think
        learning_rate (float | Literal['auto']): peak rate of adapters (unless given 5e-4, DPO 1e-5) or of base weights; of adapters where they alone train, but in the scripts of training/; auto: by published rules for width and stage, that of adapters too
        num_train_epochs (int): passes over data; 0 evaluates only
        max_steps (int): optimizer steps to train for, whatever the epochs; 0: by epochs
        per_device_train_batch_size (int): rows per device and micro-batch; of several samples if packed, else of one
        gradient_accumulation_steps (int): micro-batches per optimizer step
        seed (int): seed of initialisation, order and sampling
        num_warmup_steps (int): optimizer steps of linear warm-up
        lr_scheduler_type (Literal['linear', 'cosine', 'cosine_with_restarts', 'polynomial', 'constant', 'constant_with_warmup']): shape of the rate over the steps
        tokens_per_device (int): tokens per device and micro-batch, instead of a number of rows; 0: by rows
        lora_learning_rate (float | None): peak rate of the adapters; default: --learning_rate if given, 5e-4, DPO 1e-5
        lora_lr_multiplier (float | None): adapters train at this multiple of --learning_rate; measured best: about 10, up to 15 in runs of 100 steps; to be cautious: 2 to 3
        loraplus_lr_ratio (float): rate of lora_B over that of lora_A (LoRA+); 1 treats them alike
        adam_beta1 (float): decay of the gradient's mean
        adam_beta2 (float): decay of the gradient's square
        adam_epsilon (float): added to the root of the second moment
        max_grad_norm (float): gradients are clipped to this norm; 0: never
        expert_learning_rate (float | None): peak rate of experts' adapters in a mixture; default: that of the adapters
        weight_decay (float): decoupled weight decay; biases and norms exempt
        early_stopping_patience (int): end the run once this many evaluations in a row had no lower held-out loss than the lowest before; 0: never
        lora_dim (int | None): rank of the adapters; 0 trains every weight; default: 16 (training/ and --config: 0); the 0 is of the scripts of training/; by default an adapter that is continued keeps its rank
        lora_alpha (float): the update is scaled by lora_alpha / lora_dim
        target_modules (str | Sequence[str]): layers to adapt: all-linear, name endings, or one regular expression
        lora_dropout (float): dropout on the adapter's input, in [0, 1)
        use_rslora (bool): scale by lora_alpha / sqrt(lora_dim) (rank-stabilised LoRA)
        train_bias (Literal['none', 'all', 'lora_only']): biases to train: none, all, or those of adapted layers
        modules_to_save (str | Sequence[str]): name endings of modules to train in full and save with the adapter
        enable_lora (str | Sequence[str]): q, k, v: the parts of a packed projection that get factors of their own; the layer has one pair for all of it when absent
        expert_lora_dim (int | None): rank of each expert's update in a mixture of experts; 0 leaves experts frozen; default: lora_dim over the experts that a token is sent to, at least 1
        expert_lora_alpha (float | None): the update of an expert is scaled by this over its rank; default: lora_alpha
        only_optimize_lora (bool): freeze the base model when lora_dim > 0 (no-: train it too)
        reward_loss (Literal['bradley_terry', 'per_token']): bradley_terry compares the scores at the end of two answers; per_token is DeepSpeed-Chat's loss; which compares them at each token from the first difference on
        share_prompt (bool): compute what both answers of a pair begin with once (no-: each answer has its own)
        center_rewards_coefficient (float): weight of the squared sum of a pair's scores, which keeps them around zero
        dry_run (bool): check everything but the weights, say what the run would do, and stop
        verbose (bool): with --dry_run: list all options
        overwrite_output_dir (bool): delete what an earlier run left in --output_dir
        save_interval (int): optimizer steps between checkpoints; 0: by time only
        merge_adapter (bool): also write base and adapter merged as a transformers model
        accept_changed_data (bool): with --resume_from_checkpoint: go on where the data are not those of the checkpoint, or cannot be compared with them
        save_minutes (float): a checkpoint at least this often; 0: by steps only
        save_total_limit (int): newest checkpoints that are kept; 0: all
        merge_max_kl (float): refuse a merge that moves the distribution by more (nats per token)
        eval_interval (int): optimizer steps between evaluations; 0: at the start, each epoch and the end
        eval_iters (int): evaluation batches per device; 0: all
        sample_generations (int): held-out prompts answered before and after training
        per_device_eval_batch_size (int): rows per device in evaluation
        report_to (Literal['none', 'tensorboard', 'wandb', 'trackio'] | Sequence[Literal['none', 'tensorboard', 'wandb', 'trackio']]): trackers that get the numbers of metrics.jsonl too; one or several; their own variables, such as WANDB_MODE=offline, apply
        logging_steps (int): optimizer steps between printed lines
        tensorboard_path (str | os.PathLike[str] | None): directory of TensorBoard files; default OUTPUT_DIR/tensorboard
        base_bits (Literal[16, 4] | None): bits of the frozen base: 16, or 4 (QLoRA); default: the loaded adapter's, else 16; 4 is NF4, for linear layers and experts of the blocks; an adapter's are those with which it was trained
        zero_stage (Literal[0, 1, 2, 3] | None): ZeRO: 1 shards optimizer state, 2 gradients too, 3 weights too; default: 0; over processes; default: what --deepspeed_config says, where it is given
        gradient_checkpointing (bool | Literal['auto']): recompute activations to save memory; auto: where they would not fit; in the backward pass, instead of keeping them; without a value on; auto goes by an estimate, and on a GPU divides micro-batches whose size is not given, where that is faster
        deepspeed_config (str | os.PathLike[str] | Mapping[str, Any] | None): DeepSpeed JSON such as configs/ds/zero2.json; "auto" fields are filled in
        dtype (Literal['auto', 'fp32', 'bf16', 'fp16']): compute type; auto: bf16 where the GPU has it, fp16 on older GPUs, fp32 on CPU
        offload_activations (bool): keep the inputs of recomputed blocks in pinned host memory until the backward pass wants them; turns --gradient_checkpointing auto on
        offload (bool): keep optimizer state (and, at stage 3, weights) in host memory
        tensor_parallel_size (int): processes that hold one model between them, each a part of every layer; they see the same data
        sequence_parallel (bool): with --tensor_parallel_size above 1: between the layers each process keeps its share of the tokens alone
        context_parallel_size (int): SFT, reward, DPO: processes that divide the tokens of each row among them, for long rows; attention is exact over the whole of it
        distributed_timeout (float): seconds after which a process that is not heard of ends the run (300 at least until the first step is over)
        attn_implementation (Literal['auto', 'sdpa', 'flex_attention', 'eager']): attention kernel; auto: sdpa where the architecture has it, else eager; sdpa computes each sequence of a row alone where it can, flex_attention is for GPUs where it cannot
        fused_kernels (Literal['auto', 'on', 'off']): compute RMSNorm, SwiGLU and rotary embeddings by fewer kernels, where the architecture's are found equal to them; auto: on a GPU
        compile (bool): compile the model's blocks (torch.compile): slow to start, faster from then on
        training_graphs (Literal['auto', 'on', 'off']): replay the passes of training below the head as CUDA graphs; auto: where launching kernels would take longer than their work; micro-batches are padded to a few shapes; at ZeRO 0, without dropout
        eval_tasks (str | Sequence[str]): SFT and DPO: tasks of lm-evaluation-harness, or directories of task files, measured at each evaluation; needs dschat_lora[evaluation]
        eval_tasks_limit (int): questions of each of --eval_tasks at most; 0: all
        streaming (bool): read, tokenise and pack rows while training, at bounded memory, in place of preparing all of them before; needs --max_steps
        shuffle_buffer_size (int): rows that --streaming shuffles and packs at a time, besides shards' order
        allow_image_urls (bool): read pictures of rows from the network where they are http(s) addresses
        max_image_pixels (int): most pixels of a picture, which is refused before it is decoded
        train_vision (bool): adapt the linear layers of the part that sees and of its projector, too
        vision_learning_rate (float | None): rate of adapters there, by --train_vision or --target_modules; default: as others
        deepspeed (bool): accepted from DeepSpeed; it is always used
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
        trust_remote_code (bool): run model code that comes with a hub repository
        add_eot_token (bool): add --eot_token to the tokenizer and end every completion with it
        eot_token (str): end-of-text token of --add_eot_token
        chat_template (str | None): Jinja file that renders messages, in place of the tokenizer's own; saved with the result
        dropout (float): every dropout probability of the base model, in [0, 1)
        router_aux_loss_coef (float): SFT's loss grows by this times the load-balancing loss that the model has for its experts; 0: without
        rope_scaling (str | None): JSON object by which rotary position embeddings reach longer rows, in transformers' words, such as '{"rope_type": "yarn", "factor": 4.0}' (or linear, llama3); default: that with which the adapter that is loaded was trained, else the model's own
        neftune_noise_alpha (float): SFT: uniform noise of up to this / sqrt(L d) on the embeddings in training (NEFTune; 5 to 15), L the tokens of a sequence and d the width; 0: none
        max_seq_len (int): tokens per row, prompt and completion together
        columns (Sequence[str] | Mapping[str, str]): names of your columns, as in prompt=question completion=answer; with these the prompt is read from the column question, in all data
        packing (bool): fill rows of --max_seq_len with several samples; the mask keeps them apart
        eval_ratio (float): held-out share of the rows where no --eval_data_path is given, in [0, 1)
        data_split_name (str | Sequence[str]): split of each --data_path that is a hub data set or a directory with splits, or one for all; train when absent
        data_weights (float | Sequence[float]): times each --data_path is used per epoch, in its order; 1 each when absent
        max_source_rows (int | Sequence[int]): most rows of each --data_path, its first ones, or one number for all; 0: all
        max_repeats (int | Sequence[int]): times that a row of each --data_path may be used in the whole run at most, or one number for all; 0 or absent: no bound
        data_split (str | None): shares of the rows for steps 1, 2 and 3, such as 2,4,4; every step uses all rows when absent
        data_output_path (str | os.PathLike[str] | None): cache of tokenised data; default ~/.cache/dschat_lora
        overlong (Literal['split', 'drop', 'truncate', 'error']): what happens to samples longer than --max_seq_len: split cuts rows of `text` into pieces and drops others, drop drops all
        bad_rows (Literal['stop', 'skip']): what happens at a row that cannot be used
        unpaired_rows (Literal['refuse', 'good_only', 'all']): what is learnt of answers with a `label` (rows for KTO): nothing (the run stops), those with label true, or all, whatever the label
        preprocessing_num_workers (int): processes that read and tokenise rows; 0: one for each core, at most 16
        chat_template_kwargs (str | Mapping[str, Any] | None): JSON object of variables for the chat template, such as '{"enable_thinking": false}'; a row's column of this name comes first
        sft_only_data_path (str | os.PathLike[str] | Sequence[str | os.PathLike[str]]): further data used whole in step 1 and in no other step
        train_on_prompt (bool): take the loss on the prompt too, in evaluation as well (as DeepSpeed-Chat, and microsoft/LoRA by --obj jlm)
        train_empty_think (bool): learn the empty thought that a chat template writes for an answer without one, as Qwen3's <think></think>, which teaches not to think
        learning_rate (float | Literal['auto']): peak rate of adapters (unless given 5e-4, DPO 1e-5) or of base weights; of adapters where they alone train, but in the scripts of training/; auto: by published rules for width and stage, that of adapters too
        num_train_epochs (int): passes over data; 0 evaluates only
        max_steps (int): optimizer steps to train for, whatever the epochs; 0: by epochs
        per_device_train_batch_size (int): rows per device and micro-batch; of several samples if packed, else of one
        gradient_accumulation_steps (int): micro-batches per optimizer step
        seed (int): seed of initialisation, order and sampling
        num_warmup_steps (int): optimizer steps of linear warm-up
        lr_scheduler_type (Literal['linear', 'cosine', 'cosine_with_restarts', 'polynomial', 'constant', 'constant_with_warmup']): shape of the rate over the steps
        tokens_per_device (int): tokens per device and micro-batch, instead of a number of rows; 0: by rows
        lora_learning_rate (float | None): peak rate of the adapters; default: --learning_rate if given, 5e-4, DPO 1e-5
        lora_lr_multiplier (float | None): adapters train at this multiple of --learning_rate; measured best: about 10, up to 15 in runs of 100 steps; to be cautious: 2 to 3
        loraplus_lr_ratio (float): rate of lora_B over that of lora_A (LoRA+); 1 treats them alike
        adam_beta1 (float): decay of the gradient's mean
        adam_beta2 (float): decay of the gradient's square
        adam_epsilon (float): added to the root of the second moment
        max_grad_norm (float): gradients are clipped to this norm; 0: never
        expert_learning_rate (float | None): peak rate of experts' adapters in a mixture; default: that of the adapters
        weight_decay (float): decoupled weight decay; biases and norms exempt
        early_stopping_patience (int): end the run once this many evaluations in a row had no lower held-out loss than the lowest before; 0: never
        lora_dim (int | None): rank of the adapters; 0 trains every weight; default: 16 (training/ and --config: 0); the 0 is of the scripts of training/; by default an adapter that is continued keeps its rank
        lora_alpha (float): the update is scaled by lora_alpha / lora_dim
        target_modules (str | Sequence[str]): layers to adapt: all-linear, name endings, or one regular expression
        lora_dropout (float): dropout on the adapter's input, in [0, 1)
        use_rslora (bool): scale by lora_alpha / sqrt(lora_dim) (rank-stabilised LoRA)
        train_bias (Literal['none', 'all', 'lora_only']): biases to train: none, all, or those of adapted layers
        modules_to_save (str | Sequence[str]): name endings of modules to train in full and save with the adapter
        enable_lora (str | Sequence[str]): q, k, v: the parts of a packed projection that get factors of their own; the layer has one pair for all of it when absent
        expert_lora_dim (int | None): rank of each expert's update in a mixture of experts; 0 leaves experts frozen; default: lora_dim over the experts that a token is sent to, at least 1
        expert_lora_alpha (float | None): the update of an expert is scaled by this over its rank; default: lora_alpha
        only_optimize_lora (bool): freeze the base model when lora_dim > 0 (no-: train it too)
        loss_type (Literal['sigmoid', 'ipo', 'hinge', 'orpo', 'simpo', 'kto']): loss of pairs, sigmoid being DPO's own, or of single answers: kto; ipo is IPO's squared one, hinge SLiC's; orpo and simpo have no reference; kto takes answers that are good or bad
        beta (float): how strongly the policy stays with the reference; orpo: weight of the odds ratio; simpo: scale of the rewards, 2 unless it is given
        share_prompt (bool): compute what both answers of a pair begin with once (no-: each answer has its own)
        label_smoothing (float): share of labels taken to be wrong (conservative DPO, simpo), in [0, 0.5)
        simpo_gamma (float): simpo: by how much the chosen answer's reward is to be the larger one
        length_normalization (bool): compare log-ratios per token instead of per answer; ipo, orpo and simpo always do
        rpo_alpha (float): weight of the chosen answer's own loss per token, added to that of the pair
        precompute_ref_log_probs (bool): compute the reference's log-probabilities once, before training (no-: each time)
        dry_run (bool): check everything but the weights, say what the run would do, and stop
        verbose (bool): with --dry_run: list all options
        overwrite_output_dir (bool): delete what an earlier run left in --output_dir
        save_interval (int): optimizer steps between checkpoints; 0: by time only
        merge_adapter (bool): also write base and adapter merged as a transformers model
        accept_changed_data (bool): with --resume_from_checkpoint: go on where the data are not those of the checkpoint, or cannot be compared with them
        save_minutes (float): a checkpoint at least this often; 0: by steps only
        save_total_limit (int): newest checkpoints that are kept; 0: all
        merge_max_kl (float): refuse a merge that moves the distribution by more (nats per token)
        eval_interval (int): optimizer steps between evaluations; 0: at the start, each epoch and the end
        eval_iters (int): evaluation batches per device; 0: all
        sample_generations (int): held-out prompts answered before and after training
        per_device_eval_batch_size (int): rows per device in evaluation
        report_to (Literal['none', 'tensorboard', 'wandb', 'trackio'] | Sequence[Literal['none', 'tensorboard', 'wandb', 'trackio']]): trackers that get the numbers of metrics.jsonl too; one or several; their own variables, such as WANDB_MODE=offline, apply
        logging_steps (int): optimizer steps between printed lines
        tensorboard_path (str | os.PathLike[str] | None): directory of TensorBoard files; default OUTPUT_DIR/tensorboard
        base_bits (Literal[16, 4] | None): bits of the frozen base: 16, or 4 (QLoRA); default: the loaded adapter's, else 16; 4 is NF4, for linear layers and experts of the blocks; an adapter's are those with which it was trained
        zero_stage (Literal[0, 1, 2, 3] | None): ZeRO: 1 shards optimizer state, 2 gradients too, 3 weights too; default: 0; over processes; default: what --deepspeed_config says, where it is given
        gradient_checkpointing (bool | Literal['auto']): recompute activations to save memory; auto: where they would not fit; in the backward pass, instead of keeping them; without a value on; auto goes by an estimate, and on a GPU divides micro-batches whose size is not given, where that is faster
        deepspeed_config (str | os.PathLike[str] | Mapping[str, Any] | None): DeepSpeed JSON such as configs/ds/zero2.json; "auto" fields are filled in
        dtype (Literal['auto', 'fp32', 'bf16', 'fp16']): compute type; auto: bf16 where the GPU has it, fp16 on older GPUs, fp32 on CPU
        offload_activations (bool): keep the inputs of recomputed blocks in pinned host memory until the backward pass wants them; turns --gradient_checkpointing auto on
        offload (bool): keep optimizer state (and, at stage 3, weights) in host memory
        tensor_parallel_size (int): processes that hold one model between them, each a part of every layer; they see the same data
        sequence_parallel (bool): with --tensor_parallel_size above 1: between the layers each process keeps its share of the tokens alone
        context_parallel_size (int): SFT, reward, DPO: processes that divide the tokens of each row among them, for long rows; attention is exact over the whole of it
        distributed_timeout (float): seconds after which a process that is not heard of ends the run (300 at least until the first step is over)
        attn_implementation (Literal['auto', 'sdpa', 'flex_attention', 'eager']): attention kernel; auto: sdpa where the architecture has it, else eager; sdpa computes each sequence of a row alone where it can, flex_attention is for GPUs where it cannot
        fused_kernels (Literal['auto', 'on', 'off']): compute RMSNorm, SwiGLU and rotary embeddings by fewer kernels, where the architecture's are found equal to them; auto: on a GPU
        compile (bool): compile the model's blocks (torch.compile): slow to start, faster from then on
        training_graphs (Literal['auto', 'on', 'off']): replay the passes of training below the head as CUDA graphs; auto: where launching kernels would take longer than their work; micro-batches are padded to a few shapes; at ZeRO 0, without dropout
        eval_tasks (str | Sequence[str]): SFT and DPO: tasks of lm-evaluation-harness, or directories of task files, measured at each evaluation; needs dschat_lora[evaluation]
        eval_tasks_limit (int): questions of each of --eval_tasks at most; 0: all
        streaming (bool): read, tokenise and pack rows while training, at bounded memory, in place of preparing all of them before; needs --max_steps
        shuffle_buffer_size (int): rows that --streaming shuffles and packs at a time, besides shards' order
        desirable_weight (float): kto: weight of the loss of good answers
        undesirable_weight (float): kto: weight of the loss of bad answers
        allow_image_urls (bool): read pictures of rows from the network where they are http(s) addresses
        max_image_pixels (int): most pixels of a picture, which is refused before it is decoded
        train_vision (bool): adapt the linear layers of the part that sees and of its projector, too
        vision_learning_rate (float | None): rate of adapters there, by --train_vision or --target_modules; default: as others
        deepspeed (bool): accepted from DeepSpeed; it is always used
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
        actor_lora_dim (int | None): rank of a new adapter; 0 trains all weights; default: 16 (training/ and --config: 0); the 0 is of the scripts of training/; by default an adapter that is continued keeps its rank
        actor_learning_rate (float | Literal['auto']): peak rate of the adapter (unless given 5e-4) or of base weights; of the adapter where it alone trains, but in the script of training/; auto: by published rules for width and stage, that of the adapter too
        actor_lora_alpha (float): the update is scaled by lora_alpha / lora_dim
        actor_use_rslora (bool): scale by lora_alpha / sqrt(lora_dim)
        actor_expert_lora_dim (int | None): rank of each expert's update in a mixture of experts; 0 leaves experts frozen; default: lora_dim over the experts that a token is sent to, at least 1
        actor_expert_lora_alpha (float | None): the update of an expert is scaled by this over its rank; default: lora_alpha
        actor_target_modules (str | Sequence[str]): layers to adapt: all-linear, name endings, or one regular expression
        actor_lora_learning_rate (float): peak rate of the adapter
        actor_expert_learning_rate (float | None): peak rate of experts' adapters in a mixture; default: that of the adapter
        actor_weight_decay (float): decoupled weight decay; biases and norms exempt
        actor_zero_stage (Literal[0, 1, 2, 3] | None): ZeRO stage of this role; default: --zero_stage
        actor_gradient_checkpointing (bool | Literal['auto']): recompute activations to save memory; auto: where they would not fit; in the backward pass, instead of keeping them; without a value on; auto goes by an estimate, and on a GPU divides micro-batches whose size is not given, where that is faster
        critic_lora_dim (int | None): rank of a new adapter; 0 trains all weights; default: 16 (training/ and --config: 0); the 0 is of the scripts of training/; by default an adapter that is continued keeps its rank
        critic_lora_alpha (float): the update is scaled by lora_alpha / lora_dim
        critic_use_rslora (bool): scale by lora_alpha / sqrt(lora_dim)
        critic_expert_lora_dim (int | None): rank of each expert's update in a mixture of experts; 0 leaves experts frozen; default: lora_dim over the experts that a token is sent to, at least 1
        critic_expert_lora_alpha (float | None): the update of an expert is scaled by this over its rank; default: lora_alpha
        critic_target_modules (str | Sequence[str]): layers to adapt: all-linear, name endings, or one regular expression
        critic_learning_rate (float | Literal['auto']): peak rate of the adapter (unless given 5e-4) or of base weights; of the adapter where it alone trains, but in the script of training/; auto: by published rules for width and stage, that of the adapter too
        critic_lora_learning_rate (float): peak rate of the adapter
        critic_expert_learning_rate (float | None): peak rate of experts' adapters in a mixture; default: that of the adapter
        critic_weight_decay (float): decoupled weight decay; biases and norms exempt
        critic_zero_stage (Literal[0, 1, 2, 3] | None): ZeRO stage of this role; default: --zero_stage
        critic_gradient_checkpointing (bool | Literal['auto']): recompute activations to save memory; auto: where they would not fit; in the backward pass, instead of keeping them; without a value on; auto goes by an estimate, and on a GPU divides micro-batches whose size is not given, where that is faster
        trust_remote_code (bool): run model code that comes with a hub repository
        add_eot_token (bool): add --eot_token to the tokenizer and end every completion with it
        eot_token (str): end-of-text token of --add_eot_token
        chat_template (str | None): Jinja file that renders messages, in place of the tokenizer's own; saved with the result
        max_prompt_seq_len (int): most tokens of a prompt; longer ones follow --overlong
        max_answer_seq_len (int): most tokens of a response
        columns (Sequence[str] | Mapping[str, str]): names of your columns, as in prompt=question completion=answer; with these the prompt is read from the column question, in all data
        eval_ratio (float): held-out share of the rows where no --eval_data_path is given, in [0, 1)
        data_split_name (str | Sequence[str]): split of each --data_path that is a hub data set or a directory with splits, or one for all; train when absent
        data_weights (float | Sequence[float]): times each --data_path is used per epoch, in its order; 1 each when absent
        max_source_rows (int | Sequence[int]): most rows of each --data_path, its first ones, or one number for all; 0: all
        max_repeats (int | Sequence[int]): times that a row of each --data_path may be used in the whole run at most, or one number for all; 0 or absent: no bound
        data_split (str | None): shares of the rows for steps 1, 2 and 3, such as 2,4,4; every step uses all rows when absent
        data_output_path (str | os.PathLike[str] | None): cache of tokenised data; default ~/.cache/dschat_lora
        overlong (Literal['split', 'drop', 'truncate', 'error']): what happens to samples longer than --max_seq_len: split cuts rows of `text` into pieces and drops others, drop drops all
        bad_rows (Literal['stop', 'skip']): what happens at a row that cannot be used
        unpaired_rows (Literal['refuse', 'good_only', 'all']): what is learnt of answers with a `label` (rows for KTO): nothing (the run stops), those with label true, or all, whatever the label
        preprocessing_num_workers (int): processes that read and tokenise rows; 0: one for each core, at most 16
        chat_template_kwargs (str | Mapping[str, Any] | None): JSON object of variables for the chat template, such as '{"enable_thinking": false}'; a row's column of this name comes first
        num_prompts (int): episodes whose prompts an --environment of a class makes itself, in the place of --data_path; reset gets the number of the episode, 0 and on, as `episode`
        per_device_training_batch_size (int): responses per device and micro-batch of the update
        num_train_epochs (int): passes over data; 0 evaluates only
        max_steps (int): optimizer steps to train for, whatever the epochs; 0: by epochs
        gradient_accumulation_steps (int): micro-batches per optimizer step
        seed (int): seed of initialisation, order and sampling
        num_warmup_steps (int): optimizer steps of linear warm-up
        lr_scheduler_type (Literal['linear', 'cosine', 'cosine_with_restarts', 'polynomial', 'constant', 'constant_with_warmup']): shape of the rate over the steps
        tokens_per_device (int): cut the responses of a step into micro-batches of up to so many tokens per device, instead of so many responses; 0: by responses
        loraplus_lr_ratio (float): rate of lora_B over that of lora_A (LoRA+); 1 treats them alike
        adam_beta1 (float): decay of the gradient's mean
        adam_beta2 (float): decay of the gradient's square
        adam_epsilon (float): added to the root of the second moment
        max_grad_norm (float): gradients are clipped to this norm; 0: never
        enable_ema (bool): keep a moving average of the actor, written to actor_ema/
        ema_decay (float): share of the average that stays at a step
        only_optimize_lora (bool): freeze base models that have an adapter (no-: train them too)
        num_generations (int | None): responses to each prompt (8, or 1 where they are not compared); default: by --algorithm; 2 or more but for ppo and reinforce_pp, which do not compare them; 8, or fewer that divide --per_device_generation_batch_size
        per_device_generation_batch_size (int): responses of a generation batch on a device
        generation_batches (int): generation batches of one iteration; where no size of a batch is typed, as many as make 64 responses over all processes
        rollout_engine (Literal['own', 'vllm'] | str | object): what draws responses: own, vllm, servers or module:Class; vllm, which the run starts beside itself; servers (vLLM, SGLang or `dschat-lora serve`) that take adapters at run time, by their addresses with commas between them, such as http://127.0.0.1:8000; or module:Class of your own
        max_num_seqs (int | Literal['auto']): responses that a device decodes at a time, which changes none of them; auto: on a GPU as many as its free memory holds, on a CPU a generation batch; auto is a generation batch of episodes
        merge_for_rollouts (bool): generate with the adapter added to copies of the weights it adapts: faster on a GPU, in exchange for their memory; in 16 bits they are rounded by chance (the seed's), and sampler_error shows how far that moves the policy
        refill_share (float | None): share of the responses decoded at a time that must have ended before the next prompts of the iteration are read, together, into their rows; 0: each at once (0.25 on a GPU, 0 on a CPU)
        do_sample (bool): sample responses (no-: the likeliest token, greedy)
        temperature (float): of sampling and of all log-probabilities
        top_p (float): sample from the likeliest tokens of this probability mass
        top_k (int): sample from this many likeliest tokens; 0: all
        stop_tokens (str | Sequence[str]): tokens that end a response, beside those of tokenizer, template and model
        stop_strings (str | Sequence[str]): texts that end a response with the token that completes them
        environment (str | object | None): what answers the actor's turns: module:function or module:Class, or one of a library, such as gymnasium:ENV_ID; the function answers with messages of a user or tool, or ends the episode; objects of the class have reset, and step or tools, and rewards; or module:Player with play(tasks, draw, *, key), which makes the responses; or gymnasium:ENV_ID, reasoning_gym:TASK, verifiers:TASKSET, openenv:URL, or mcp:COMMAND and mcp:URL, whose tools are offered
        max_turns (int): most turns of the actor in an episode with --environment, of one response's length
        reward_weights (float | Sequence[float]): weight of each reward in the sum of scores, those of a class in the order of its names, and last that of the reward model, if there is one; 1 each by default
        reward_batch (Literal['all', 'group']): responses of a call: all that a process has, or those to one prompt
        reward_retries (int): further calls of a reward function, or of what answers the actor, that failed
        reward_timeout (float): seconds that a call of a reward function, or of what answers the actor, may take; 0: as many as it likes
        clip_reward_value (float): scores are clipped to this absolute value once they are scaled; 0: never
        reward_scaling (Literal['none', 'running', 'initial']): running: divide scores by their standard deviation so far; initial: by that of the first iterations' scores, at least 64, after subtracting their mean; the critic starts in these units (with none and running in those of the reward model)
        missing_eos_penalty (float): subtracted from the score of a response that was cut off
        soft_overlong_tokens (int): scores fall by up to 1 over this many last tokens of --max_answer_seq_len (DAPO's soft overlong punishment; dapo: a fifth of them); 0: never
        algorithm (Literal['ppo', 'rloo', 'grpo', 'reinforce_pp', 'reinforce_pp_baseline', 'dr_grpo', 'dapo', 'gspo', 'cispo', 'gdpo', 'sapo', 'distill'] | str | Callable[..., Any] | Algorithm): how the actor learns; ppo has a critic; reinforce_pp has none; grpo and its kin compare the responses to a prompt
        kl_coef (float | None): weight of the divergence from the reference (0.1 or 0); default: by --algorithm
        ppo_epochs (int): passes over the responses of an iteration
        kl_estimator (Literal['k1', 'k2', 'k3'] | None): estimator of the divergence at a token; default: by --algorithm
        kl_in (Literal['reward', 'loss'] | None): where the divergence is paid: in the reward of each token, or in the loss; default: by --algorithm
        adaptive_kl_target (float): nats per response that kl_coef is steered towards; 0: kl_coef stays
        kl_horizon (int): responses over which kl_coef adapts
        gamma (float): discount of later rewards, in [0, 1]
        lam (float): bias and variance of advantages (GAE), in [0, 1]; below 1, a score reaches a token t tokens before the end only by lam^t, and by the critic's values for the rest
        cliprange (float | None): bound on the change of a token's probability ratio, fall and rise alike (0.2); default: by --algorithm
        cliprange_low (float | None): bound on the fall of the ratio, if not --cliprange; default: by --algorithm
        cliprange_high (float | None): bound on the rise of the ratio, if not --cliprange; default: by --algorithm
        dual_clip (float): bound on the loss of a token with negative advantage A, -A times this; 0: none
        sapo_temperature_pos (float): SAPO: how fast the weight of a token with positive advantage falls with its ratio
        sapo_temperature_neg (float): SAPO: the same of other tokens; above --sapo_temperature_pos, to hold them closer
        loss_normalization (Literal['token', 'sequence', 'constant'] | None): token: every token weighs alike; sequence: every response does; constant: divide by --max_answer_seq_len; default: by --algorithm
        mask_truncated_completions (bool | None): leave responses that were cut off out of the loss (DAPO's overlong filter); default: by --algorithm
        dynamic_sampling (int | None): replace prompts whose responses all got one reward by further prompts, at most so many times an iteration; 0: never; default: by --algorithm
        cliprange_value (float): bound on the change of a value
        whiten_advantages (bool): advantages of an iteration get mean 0 and standard deviation 1
        critic_warmup_iterations (int): first iterations at which the critic alone learns, the actor stays as it is
        importance_cap (float): largest weight of a token in the policy's loss, weights being its probability in the policy by that in what it was drawn from (top-p, top-k, another temperature); 0: all 1; the same as --rollout_correction tis --rollout_is_threshold of this number
        rollout_correction (Literal['none', 'tis', 'mis'] | None): importance weights in the policy's loss where tokens come from another distribution than the one that learns; tis: truncated at --rollout_is_threshold; mis: 0 beyond it; default: tis with another --rollout_engine than own, else none
        rollout_is (Literal['token', 'sequence']): whether each token has a weight, or each response the product of its tokens'
        rollout_is_threshold (float): largest weight of --rollout_correction
        rollout_is_threshold_lower (float): smallest weight: below it tis gives this one, mis 0
        use_rollout_logprobs (bool): take old log-probabilities from the decode loop instead of a forward pass: faster; they differ by rounding, which sampler_error shows
        entropy_coef (float): weight of the entropy bonus
        target_kl (float): end an iteration's updates when the policy has moved this far from where it began (mean nats per token); 0: never
        unsupervised_dataset_name (str | None): text to mix in: files, a directory or a hub data set (name:configuration)
        unsupervised_dataset_config_name (str | None): configuration of a hub data set, as in name:configuration
        unsup_coef (float): weight of its loss per token beside the policy's
        dry_run (bool): check everything but the weights, say what the run would do, and stop
        verbose (bool): with --dry_run: list all options
        overwrite_output_dir (bool): delete what an earlier run left in --output_dir
        save_interval (int): optimizer steps between checkpoints; 0: by time only
        merge_adapter (bool): also write base and adapter merged as a transformers model
        accept_changed_data (bool): with --resume_from_checkpoint: go on where the data are not those of the checkpoint, or cannot be compared with them
        save_minutes (float): a checkpoint at least this often; 0: by steps only
        save_total_limit (int): newest checkpoints that are kept; 0: all
        merge_max_kl (float): refuse a merge that moves the distribution by more (nats per token)
        eval_interval (int): optimizer steps between evaluations; 0: at the start, each epoch and the end
        eval_iters (int): evaluation batches per device; 0: all
        sample_generations (int): held-out prompts answered before and after training
        judge_function (str | object | None): module:function that judges held-out responses at evaluations; never trained on
        eval_prompts (int): held-out prompts answered at each evaluation, greedily and by sampling; 0: none, and none is held out unless --eval_ratio is given
        report_to (Literal['none', 'tensorboard', 'wandb', 'trackio'] | Sequence[Literal['none', 'tensorboard', 'wandb', 'trackio']]): trackers that get the numbers of metrics.jsonl too; one or several; their own variables, such as WANDB_MODE=offline, apply
        logging_steps (int): optimizer steps between printed lines
        log_rollouts (int): responses of an iteration that are kept in rollouts.jsonl.gz; 0: none
        print_answers (bool): show a response at every iteration
        print_answers_interval (int): iterations between shown responses; 0: never
        tensorboard_path (str | os.PathLike[str] | None): directory of TensorBoard files; default OUTPUT_DIR/tensorboard
        base_bits (Literal[16, 4] | None): bits of the frozen base: 16, or 4 (QLoRA); default: the loaded adapter's, else 16; 4 is NF4, for linear layers and experts of the blocks; an adapter's are those with which it was trained
        zero_stage (Literal[0, 1, 2, 3] | None): ZeRO: 1 shards optimizer state, 2 gradients too, 3 weights too; default: 0; over processes; default: what --deepspeed_config says, where it is given
        deepspeed_config (str | os.PathLike[str] | Mapping[str, Any] | None): DeepSpeed JSON such as configs/ds/zero2.json; "auto" fields are filled in
        dtype (Literal['auto', 'fp32', 'bf16', 'fp16']): compute type; auto: bf16 where the GPU has it, fp16 on older GPUs, fp32 on CPU
        offload_activations (bool): keep the inputs of recomputed blocks in pinned host memory until the backward pass wants them; turns --gradient_checkpointing auto on
        offload (bool): keep optimizer state (and, at stage 3, weights) in host memory
        tensor_parallel_size (int): processes that hold one model between them, each a part of every layer; they see the same data
        sequence_parallel (bool): with --tensor_parallel_size above 1: between the layers each process keeps its share of the tokens alone
        context_parallel_size (int): SFT, reward, DPO: processes that divide the tokens of each row among them, for long rows; attention is exact over the whole of it
        distributed_timeout (float): seconds after which a process that is not heard of ends the run (300 at least until the first step is over)
        attn_implementation (Literal['auto', 'sdpa', 'flex_attention', 'eager']): attention kernel; auto: sdpa where the architecture has it, else eager; sdpa computes each sequence of a row alone where it can, flex_attention is for GPUs where it cannot
        fused_kernels (Literal['auto', 'on', 'off']): compute RMSNorm, SwiGLU and rotary embeddings by fewer kernels, where the architecture's are found equal to them; auto: on a GPU
        compile (bool): compile the model's blocks (torch.compile): slow to start, faster from then on
        training_graphs (Literal['auto', 'on', 'off']): replay the passes of training below the head as CUDA graphs; auto: where launching kernels would take longer than their work; micro-batches are padded to a few shapes; at ZeRO 0, without dropout
        release_inference_cache (bool): free the cache of keys and values before each update (by default it is kept on a GPU that has room for it)
        streaming (bool): read, tokenise and pack rows while training, at bounded memory, in place of preparing all of them before; needs --max_steps
        shuffle_buffer_size (int): rows that --streaming shuffles and packs at a time, besides shards' order
        allow_image_urls (bool): read pictures of rows from the network where they are http(s) addresses
        max_image_pixels (int): most pixels of a picture, which is refused before it is decoded
        train_vision (bool): adapt the linear layers of the part that sees and of its projector, too
        vision_learning_rate (float | None): rate of adapters there, by --train_vision or --target_modules; default: as others
        vllm_command (str | None): what starts the server of --rollout_engine vllm: vLLM of another environment such as `/envs/vllm/bin/vllm serve`, with further options if you like; default: `vllm serve`
        vllm_gpu_memory_utilization (float): share of the memory of a GPU, or of a host without GPUs, that --rollout_engine vllm takes while it draws; on a GPU it sleeps while the actor trains
        rollout_adapter_dir (str | os.PathLike[str] | None): directory that the servers of --rollout_engine see too, in which they find the adapter; default: one in memory, for servers on this machine
        rollout_timeout (float): seconds that a server of --rollout_engine, or a teacher's, may take for a response, and vllm to start
        rollouts_ahead (int): have the servers of --rollout_engine draw the responses of so many further iterations while one trains, by adapters that are at most so many iterations old; --rollout_correction weighs for that; 0: they wait for each other
        agent (str | object | None): module:function that plays an episode: it gets the row and a client of the openai package for the actor, asks as often as it likes, and returns the reward
        agent_command (str | None): command that plays an episode: the row is on its standard input, OPENAI_BASE_URL is the actor's, and the last line that it prints is the reward
        agent_timeout (float): seconds of an agent's episode, but for those in which the actor answers
        agent_retries (int): further attempts at an agent's episode that failed
        agent_max_calls (int): most answers in an episode of an agent
        teacher_model_name_or_path (str | os.PathLike[str] | None): the teacher: a model, run or adapter, or a server's http://HOST:PORT/v1; default: the actor as it was, with --teacher_system_prompt; of --algorithm distill; a run, an adapter, a model directory or a hub name, of the actor's tokenizer; an adapter on the actor's base shares its weights; a server of vLLM or `dschat-lora serve`, with #NAME where it has several models
        teacher_bits (Literal[16, 4] | None): bits of the teacher's base, 16 or 4 (NF4); default: as for --base_bits
        teacher_system_prompt (str | None): system message that the teacher reads before each prompt, and the actor does not
        distill_loss (Literal['reverse_kl', 'forward_kl', 'jsd', 'sampled_reverse_kl']): divergence from the teacher; at each token, over the whole vocabulary: reverse_kl, forward_kl or jsd (generalised, GKD); or sampled_reverse_kl, that of the tokens drawn, as their advantage
        jsd_beta (float): the teacher's share in the mixture of --distill_loss jsd, in (0, 1)
        distill_top_k (int): tokens, the teacher's likeliest at each position, that a divergence tells apart; all others count as one; 0: the whole vocabulary
        on_policy_share (float): share of the responses that the actor draws, in [0, 1]; the others are answers of the data (GKD's lambda)
        parts (Any | Sequence[Any]): module:Class, one or several, of objects that are told of every step and iteration (after_step, after_iteration): metrics, logs and coefficients of your own
        guard (Literal['warn', 'stop', 'off']): where the entropy collapses, responses double or halve their length or stop to end, the reward rises while the judge's or that of held-out prompts falls, or --kl_budget is spent: warn, stop with a checkpoint, or go on silently (off)
        kl_budget (float): divergence from the reference that --guard allows, nats per response; 0: any
        deepspeed (bool): accepted from DeepSpeed; it is always used
        print_loss (bool): print the loss at every optimizer step
        actor_lora_module_name (str | None): adapt the linear layers whose name contains this (DeepSpeed-Chat's rule)
        actor_dropout (float): accepted from DeepSpeed-Chat; old and new log-probabilities need one network
        critic_lora_module_name (str | None): adapt the linear layers whose name contains this (DeepSpeed-Chat's rule)
        critic_dropout (float): accepted from DeepSpeed-Chat; old and new log-probabilities need one network
        compute_fp32_loss (bool): accepted from DeepSpeed-Chat; the loss is always computed in fp32
        enable_test_mode (bool): stop after --test_stop_step optimizer steps
        test_stop_step (int): optimizer steps of --enable_test_mode
        num_padding_at_beginning (int): accepted from DeepSpeed-Chat; nothing is guessed from padding
        align_overflow (bool): accepted from DeepSpeed-Chat; a loss that is not finite skips both steps
        offload_reference_model (bool): accepted from DeepSpeed-Chat; the reference shares the actor's base
        offload_reward_model (bool): accepted from DeepSpeed-Chat; the reward model shares the critic's base
        enable_hybrid_engine (bool): accepted from DeepSpeed-Chat; rollouts have a decode loop of their own
        unpin_actor_parameters (bool): accepted from DeepSpeed-Chat, for its hybrid engine
        inference_tp_size (int): accepted from DeepSpeed-Chat, for its hybrid engine; rollouts run on the processes that hold the model (--tensor_parallel_size)
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
        actor_lora_dim (int | None): rank of a new adapter; 0 trains all weights; default: 16 (training/ and --config: 0); the 0 is of the scripts of training/; by default an adapter that is continued keeps its rank
        actor_learning_rate (float | Literal['auto']): peak rate of the adapter (unless given 5e-4) or of base weights; of the adapter where it alone trains, but in the script of training/; auto: by published rules for width and stage, that of the adapter too
        actor_lora_alpha (float): the update is scaled by lora_alpha / lora_dim
        actor_use_rslora (bool): scale by lora_alpha / sqrt(lora_dim)
        actor_expert_lora_dim (int | None): rank of each expert's update in a mixture of experts; 0 leaves experts frozen; default: lora_dim over the experts that a token is sent to, at least 1
        actor_expert_lora_alpha (float | None): the update of an expert is scaled by this over its rank; default: lora_alpha
        actor_target_modules (str | Sequence[str]): layers to adapt: all-linear, name endings, or one regular expression
        actor_lora_learning_rate (float): peak rate of the adapter
        actor_expert_learning_rate (float | None): peak rate of experts' adapters in a mixture; default: that of the adapter
        actor_weight_decay (float): decoupled weight decay; biases and norms exempt
        actor_zero_stage (Literal[0, 1, 2, 3] | None): ZeRO stage of this role; default: --zero_stage
        actor_gradient_checkpointing (bool | Literal['auto']): recompute activations to save memory; auto: where they would not fit; in the backward pass, instead of keeping them; without a value on; auto goes by an estimate, and on a GPU divides micro-batches whose size is not given, where that is faster
        critic_lora_dim (int | None): rank of a new adapter; 0 trains all weights; default: 16 (training/ and --config: 0); the 0 is of the scripts of training/; by default an adapter that is continued keeps its rank
        critic_lora_alpha (float): the update is scaled by lora_alpha / lora_dim
        critic_use_rslora (bool): scale by lora_alpha / sqrt(lora_dim)
        critic_expert_lora_dim (int | None): rank of each expert's update in a mixture of experts; 0 leaves experts frozen; default: lora_dim over the experts that a token is sent to, at least 1
        critic_expert_lora_alpha (float | None): the update of an expert is scaled by this over its rank; default: lora_alpha
        critic_target_modules (str | Sequence[str]): layers to adapt: all-linear, name endings, or one regular expression
        critic_learning_rate (float | Literal['auto']): peak rate of the adapter (unless given 5e-4) or of base weights; of the adapter where it alone trains, but in the script of training/; auto: by published rules for width and stage, that of the adapter too
        critic_lora_learning_rate (float): peak rate of the adapter
        critic_expert_learning_rate (float | None): peak rate of experts' adapters in a mixture; default: that of the adapter
        critic_weight_decay (float): decoupled weight decay; biases and norms exempt
        critic_zero_stage (Literal[0, 1, 2, 3] | None): ZeRO stage of this role; default: --zero_stage
        critic_gradient_checkpointing (bool | Literal['auto']): recompute activations to save memory; auto: where they would not fit; in the backward pass, instead of keeping them; without a value on; auto goes by an estimate, and on a GPU divides micro-batches whose size is not given, where that is faster
        trust_remote_code (bool): run model code that comes with a hub repository
        add_eot_token (bool): add --eot_token to the tokenizer and end every completion with it
        eot_token (str): end-of-text token of --add_eot_token
        chat_template (str | None): Jinja file that renders messages, in place of the tokenizer's own; saved with the result
        max_prompt_seq_len (int): most tokens of a prompt; longer ones follow --overlong
        max_answer_seq_len (int): most tokens of a response
        columns (Sequence[str] | Mapping[str, str]): names of your columns, as in prompt=question completion=answer; with these the prompt is read from the column question, in all data
        eval_ratio (float): held-out share of the rows where no --eval_data_path is given, in [0, 1)
        data_split_name (str | Sequence[str]): split of each --data_path that is a hub data set or a directory with splits, or one for all; train when absent
        data_weights (float | Sequence[float]): times each --data_path is used per epoch, in its order; 1 each when absent
        max_source_rows (int | Sequence[int]): most rows of each --data_path, its first ones, or one number for all; 0: all
        max_repeats (int | Sequence[int]): times that a row of each --data_path may be used in the whole run at most, or one number for all; 0 or absent: no bound
        data_split (str | None): shares of the rows for steps 1, 2 and 3, such as 2,4,4; every step uses all rows when absent
        data_output_path (str | os.PathLike[str] | None): cache of tokenised data; default ~/.cache/dschat_lora
        overlong (Literal['split', 'drop', 'truncate', 'error']): what happens to samples longer than --max_seq_len: split cuts rows of `text` into pieces and drops others, drop drops all
        bad_rows (Literal['stop', 'skip']): what happens at a row that cannot be used
        unpaired_rows (Literal['refuse', 'good_only', 'all']): what is learnt of answers with a `label` (rows for KTO): nothing (the run stops), those with label true, or all, whatever the label
        preprocessing_num_workers (int): processes that read and tokenise rows; 0: one for each core, at most 16
        chat_template_kwargs (str | Mapping[str, Any] | None): JSON object of variables for the chat template, such as '{"enable_thinking": false}'; a row's column of this name comes first
        num_prompts (int): episodes whose prompts an --environment of a class makes itself, in the place of --data_path; reset gets the number of the episode, 0 and on, as `episode`
        per_device_training_batch_size (int): responses per device and micro-batch of the update
        num_train_epochs (int): passes over data; 0 evaluates only
        max_steps (int): optimizer steps to train for, whatever the epochs; 0: by epochs
        gradient_accumulation_steps (int): micro-batches per optimizer step
        seed (int): seed of initialisation, order and sampling
        num_warmup_steps (int): optimizer steps of linear warm-up
        lr_scheduler_type (Literal['linear', 'cosine', 'cosine_with_restarts', 'polynomial', 'constant', 'constant_with_warmup']): shape of the rate over the steps
        tokens_per_device (int): cut the responses of a step into micro-batches of up to so many tokens per device, instead of so many responses; 0: by responses
        loraplus_lr_ratio (float): rate of lora_B over that of lora_A (LoRA+); 1 treats them alike
        adam_beta1 (float): decay of the gradient's mean
        adam_beta2 (float): decay of the gradient's square
        adam_epsilon (float): added to the root of the second moment
        max_grad_norm (float): gradients are clipped to this norm; 0: never
        enable_ema (bool): keep a moving average of the actor, written to actor_ema/
        ema_decay (float): share of the average that stays at a step
        only_optimize_lora (bool): freeze base models that have an adapter (no-: train them too)
        per_device_generation_batch_size (int): responses of a generation batch on a device
        generation_batches (int): generation batches of one iteration; where no size of a batch is typed, as many as make 64 responses over all processes
        temperature (float): of sampling and of all log-probabilities
        rollout_engine (Literal['own', 'vllm'] | str | object): what draws responses: own, vllm, servers or module:Class; vllm, which the run starts beside itself; servers (vLLM, SGLang or `dschat-lora serve`) that take adapters at run time, by their addresses with commas between them, such as http://127.0.0.1:8000; or module:Class of your own
        max_num_seqs (int | Literal['auto']): responses that a device decodes at a time, which changes none of them; auto: on a GPU as many as its free memory holds, on a CPU a generation batch; auto is a generation batch of episodes
        num_generations (int | None): responses to each prompt (8, or 1 where they are not compared); default: by --algorithm; 2 or more but for ppo and reinforce_pp, which do not compare them; 8, or fewer that divide --per_device_generation_batch_size
        merge_for_rollouts (bool): generate with the adapter added to copies of the weights it adapts: faster on a GPU, in exchange for their memory; in 16 bits they are rounded by chance (the seed's), and sampler_error shows how far that moves the policy
        refill_share (float | None): share of the responses decoded at a time that must have ended before the next prompts of the iteration are read, together, into their rows; 0: each at once (0.25 on a GPU, 0 on a CPU)
        do_sample (bool): sample responses (no-: the likeliest token, greedy)
        top_p (float): sample from the likeliest tokens of this probability mass
        top_k (int): sample from this many likeliest tokens; 0: all
        stop_tokens (str | Sequence[str]): tokens that end a response, beside those of tokenizer, template and model
        stop_strings (str | Sequence[str]): texts that end a response with the token that completes them
        environment (str | object | None): what answers the actor's turns: module:function or module:Class, or one of a library, such as gymnasium:ENV_ID; the function answers with messages of a user or tool, or ends the episode; objects of the class have reset, and step or tools, and rewards; or module:Player with play(tasks, draw, *, key), which makes the responses; or gymnasium:ENV_ID, reasoning_gym:TASK, verifiers:TASKSET, openenv:URL, or mcp:COMMAND and mcp:URL, whose tools are offered
        max_turns (int): most turns of the actor in an episode with --environment, of one response's length
        reward_weights (float | Sequence[float]): weight of each reward in the sum of scores, those of a class in the order of its names, and last that of the reward model, if there is one; 1 each by default
        reward_batch (Literal['all', 'group']): responses of a call: all that a process has, or those to one prompt
        reward_retries (int): further calls of a reward function, or of what answers the actor, that failed
        reward_timeout (float): seconds that a call of a reward function, or of what answers the actor, may take; 0: as many as it likes
        clip_reward_value (float): scores are clipped to this absolute value once they are scaled; 0: never
        reward_scaling (Literal['none', 'running', 'initial']): running: divide scores by their standard deviation so far; initial: by that of the first iterations' scores, at least 64, after subtracting their mean; the critic starts in these units (with none and running in those of the reward model)
        missing_eos_penalty (float): subtracted from the score of a response that was cut off
        soft_overlong_tokens (int): scores fall by up to 1 over this many last tokens of --max_answer_seq_len (DAPO's soft overlong punishment; dapo: a fifth of them); 0: never
        ppo_epochs (int): passes over the responses of an iteration
        kl_coef (float | None): weight of the divergence from the reference (0.1 or 0); default: by --algorithm
        kl_estimator (Literal['k1', 'k2', 'k3'] | None): estimator of the divergence at a token; default: by --algorithm
        kl_in (Literal['reward', 'loss'] | None): where the divergence is paid: in the reward of each token, or in the loss; default: by --algorithm
        adaptive_kl_target (float): nats per response that kl_coef is steered towards; 0: kl_coef stays
        kl_horizon (int): responses over which kl_coef adapts
        gamma (float): discount of later rewards, in [0, 1]
        lam (float): bias and variance of advantages (GAE), in [0, 1]; below 1, a score reaches a token t tokens before the end only by lam^t, and by the critic's values for the rest
        cliprange (float | None): bound on the change of a token's probability ratio, fall and rise alike (0.2); default: by --algorithm
        cliprange_low (float | None): bound on the fall of the ratio, if not --cliprange; default: by --algorithm
        cliprange_high (float | None): bound on the rise of the ratio, if not --cliprange; default: by --algorithm
        dual_clip (float): bound on the loss of a token with negative advantage A, -A times this; 0: none
        sapo_temperature_pos (float): SAPO: how fast the weight of a token with positive advantage falls with its ratio
        sapo_temperature_neg (float): SAPO: the same of other tokens; above --sapo_temperature_pos, to hold them closer
        loss_normalization (Literal['token', 'sequence', 'constant'] | None): token: every token weighs alike; sequence: every response does; constant: divide by --max_answer_seq_len; default: by --algorithm
        mask_truncated_completions (bool | None): leave responses that were cut off out of the loss (DAPO's overlong filter); default: by --algorithm
        dynamic_sampling (int | None): replace prompts whose responses all got one reward by further prompts, at most so many times an iteration; 0: never; default: by --algorithm
        cliprange_value (float): bound on the change of a value
        whiten_advantages (bool): advantages of an iteration get mean 0 and standard deviation 1
        critic_warmup_iterations (int): first iterations at which the critic alone learns, the actor stays as it is
        importance_cap (float): largest weight of a token in the policy's loss, weights being its probability in the policy by that in what it was drawn from (top-p, top-k, another temperature); 0: all 1; the same as --rollout_correction tis --rollout_is_threshold of this number
        rollout_correction (Literal['none', 'tis', 'mis'] | None): importance weights in the policy's loss where tokens come from another distribution than the one that learns; tis: truncated at --rollout_is_threshold; mis: 0 beyond it; default: tis with another --rollout_engine than own, else none
        rollout_is (Literal['token', 'sequence']): whether each token has a weight, or each response the product of its tokens'
        rollout_is_threshold (float): largest weight of --rollout_correction
        rollout_is_threshold_lower (float): smallest weight: below it tis gives this one, mis 0
        use_rollout_logprobs (bool): take old log-probabilities from the decode loop instead of a forward pass: faster; they differ by rounding, which sampler_error shows
        entropy_coef (float): weight of the entropy bonus
        target_kl (float): end an iteration's updates when the policy has moved this far from where it began (mean nats per token); 0: never
        unsupervised_dataset_name (str | None): text to mix in: files, a directory or a hub data set (name:configuration)
        unsupervised_dataset_config_name (str | None): configuration of a hub data set, as in name:configuration
        unsup_coef (float): weight of its loss per token beside the policy's
        dry_run (bool): check everything but the weights, say what the run would do, and stop
        verbose (bool): with --dry_run: list all options
        overwrite_output_dir (bool): delete what an earlier run left in --output_dir
        save_interval (int): optimizer steps between checkpoints; 0: by time only
        merge_adapter (bool): also write base and adapter merged as a transformers model
        accept_changed_data (bool): with --resume_from_checkpoint: go on where the data are not those of the checkpoint, or cannot be compared with them
        save_minutes (float): a checkpoint at least this often; 0: by steps only
        save_total_limit (int): newest checkpoints that are kept; 0: all
        merge_max_kl (float): refuse a merge that moves the distribution by more (nats per token)
        eval_interval (int): optimizer steps between evaluations; 0: at the start, each epoch and the end
        eval_iters (int): evaluation batches per device; 0: all
        sample_generations (int): held-out prompts answered before and after training
        judge_function (str | object | None): module:function that judges held-out responses at evaluations; never trained on
        eval_prompts (int): held-out prompts answered at each evaluation, greedily and by sampling; 0: none, and none is held out unless --eval_ratio is given
        report_to (Literal['none', 'tensorboard', 'wandb', 'trackio'] | Sequence[Literal['none', 'tensorboard', 'wandb', 'trackio']]): trackers that get the numbers of metrics.jsonl too; one or several; their own variables, such as WANDB_MODE=offline, apply
        logging_steps (int): optimizer steps between printed lines
        log_rollouts (int): responses of an iteration that are kept in rollouts.jsonl.gz; 0: none
        print_answers (bool): show a response at every iteration
        print_answers_interval (int): iterations between shown responses; 0: never
        tensorboard_path (str | os.PathLike[str] | None): directory of TensorBoard files; default OUTPUT_DIR/tensorboard
        base_bits (Literal[16, 4] | None): bits of the frozen base: 16, or 4 (QLoRA); default: the loaded adapter's, else 16; 4 is NF4, for linear layers and experts of the blocks; an adapter's are those with which it was trained
        zero_stage (Literal[0, 1, 2, 3] | None): ZeRO: 1 shards optimizer state, 2 gradients too, 3 weights too; default: 0; over processes; default: what --deepspeed_config says, where it is given
        deepspeed_config (str | os.PathLike[str] | Mapping[str, Any] | None): DeepSpeed JSON such as configs/ds/zero2.json; "auto" fields are filled in
        dtype (Literal['auto', 'fp32', 'bf16', 'fp16']): compute type; auto: bf16 where the GPU has it, fp16 on older GPUs, fp32 on CPU
        offload_activations (bool): keep the inputs of recomputed blocks in pinned host memory until the backward pass wants them; turns --gradient_checkpointing auto on
        offload (bool): keep optimizer state (and, at stage 3, weights) in host memory
        tensor_parallel_size (int): processes that hold one model between them, each a part of every layer; they see the same data
        sequence_parallel (bool): with --tensor_parallel_size above 1: between the layers each process keeps its share of the tokens alone
        context_parallel_size (int): SFT, reward, DPO: processes that divide the tokens of each row among them, for long rows; attention is exact over the whole of it
        distributed_timeout (float): seconds after which a process that is not heard of ends the run (300 at least until the first step is over)
        attn_implementation (Literal['auto', 'sdpa', 'flex_attention', 'eager']): attention kernel; auto: sdpa where the architecture has it, else eager; sdpa computes each sequence of a row alone where it can, flex_attention is for GPUs where it cannot
        fused_kernels (Literal['auto', 'on', 'off']): compute RMSNorm, SwiGLU and rotary embeddings by fewer kernels, where the architecture's are found equal to them; auto: on a GPU
        compile (bool): compile the model's blocks (torch.compile): slow to start, faster from then on
        training_graphs (Literal['auto', 'on', 'off']): replay the passes of training below the head as CUDA graphs; auto: where launching kernels would take longer than their work; micro-batches are padded to a few shapes; at ZeRO 0, without dropout
        release_inference_cache (bool): free the cache of keys and values before each update (by default it is kept on a GPU that has room for it)
        distill_loss (Literal['reverse_kl', 'forward_kl', 'jsd', 'sampled_reverse_kl']): divergence from the teacher; at each token, over the whole vocabulary: reverse_kl, forward_kl or jsd (generalised, GKD); or sampled_reverse_kl, that of the tokens drawn, as their advantage
        teacher_system_prompt (str | None): system message that the teacher reads before each prompt, and the actor does not
        on_policy_share (float): share of the responses that the actor draws, in [0, 1]; the others are answers of the data (GKD's lambda)
        teacher_bits (Literal[16, 4] | None): bits of the teacher's base, 16 or 4 (NF4); default: as for --base_bits
        jsd_beta (float): the teacher's share in the mixture of --distill_loss jsd, in (0, 1)
        distill_top_k (int): tokens, the teacher's likeliest at each position, that a divergence tells apart; all others count as one; 0: the whole vocabulary
        streaming (bool): read, tokenise and pack rows while training, at bounded memory, in place of preparing all of them before; needs --max_steps
        shuffle_buffer_size (int): rows that --streaming shuffles and packs at a time, besides shards' order
        vllm_command (str | None): what starts the server of --rollout_engine vllm: vLLM of another environment such as `/envs/vllm/bin/vllm serve`, with further options if you like; default: `vllm serve`
        vllm_gpu_memory_utilization (float): share of the memory of a GPU, or of a host without GPUs, that --rollout_engine vllm takes while it draws; on a GPU it sleeps while the actor trains
        rollout_adapter_dir (str | os.PathLike[str] | None): directory that the servers of --rollout_engine see too, in which they find the adapter; default: one in memory, for servers on this machine
        rollout_timeout (float): seconds that a server of --rollout_engine, or a teacher's, may take for a response, and vllm to start
        rollouts_ahead (int): have the servers of --rollout_engine draw the responses of so many further iterations while one trains, by adapters that are at most so many iterations old; --rollout_correction weighs for that; 0: they wait for each other
        agent (str | object | None): module:function that plays an episode: it gets the row and a client of the openai package for the actor, asks as often as it likes, and returns the reward
        agent_command (str | None): command that plays an episode: the row is on its standard input, OPENAI_BASE_URL is the actor's, and the last line that it prints is the reward
        agent_timeout (float): seconds of an agent's episode, but for those in which the actor answers
        agent_retries (int): further attempts at an agent's episode that failed
        agent_max_calls (int): most answers in an episode of an agent
        parts (Any | Sequence[Any]): module:Class, one or several, of objects that are told of every step and iteration (after_step, after_iteration): metrics, logs and coefficients of your own
        guard (Literal['warn', 'stop', 'off']): where the entropy collapses, responses double or halve their length or stop to end, the reward rises while the judge's or that of held-out prompts falls, or --kl_budget is spent: warn, stop with a checkpoint, or go on silently (off)
        kl_budget (float): divergence from the reference that --guard allows, nats per response; 0: any
        deepspeed (bool): accepted from DeepSpeed; it is always used
        print_loss (bool): print the loss at every optimizer step
        actor_lora_module_name (str | None): adapt the linear layers whose name contains this (DeepSpeed-Chat's rule)
        actor_dropout (float): accepted from DeepSpeed-Chat; old and new log-probabilities need one network
        critic_lora_module_name (str | None): adapt the linear layers whose name contains this (DeepSpeed-Chat's rule)
        critic_dropout (float): accepted from DeepSpeed-Chat; old and new log-probabilities need one network
        compute_fp32_loss (bool): accepted from DeepSpeed-Chat; the loss is always computed in fp32
        enable_test_mode (bool): stop after --test_stop_step optimizer steps
        test_stop_step (int): optimizer steps of --enable_test_mode
        num_padding_at_beginning (int): accepted from DeepSpeed-Chat; nothing is guessed from padding
        align_overflow (bool): accepted from DeepSpeed-Chat; a loss that is not finite skips both steps
        offload_reference_model (bool): accepted from DeepSpeed-Chat; the reference shares the actor's base
        offload_reward_model (bool): accepted from DeepSpeed-Chat; the reward model shares the critic's base
        enable_hybrid_engine (bool): accepted from DeepSpeed-Chat; rollouts have a decode loop of their own
        unpin_actor_parameters (bool): accepted from DeepSpeed-Chat, for its hybrid engine
        inference_tp_size (int): accepted from DeepSpeed-Chat, for its hybrid engine; rollouts run on the processes that hold the model (--tensor_parallel_size)
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
        base_bits (Literal[16, 4] | None): bits of the base's weights: 16, or 4 (NF4); by default as the adapter was trained
        max_seq_len (int): longest sequence in tokens; 0: as many as the model has positions
        columns (Sequence[str] | Mapping[str, str]): names of columns, as in prompt=question completion=answer
        seed (int): of the draws
        dtype (Literal['auto', 'fp32', 'bf16', 'fp16']): compute type; auto: as in training
        per_device_eval_batch_size (int): sequences at a time
        attn_implementation (Literal['auto', 'sdpa', 'eager']): attention kernel of transformers; auto: sdpa where it has it, else eager
        trust_remote_code (bool): run model code that comes with a hub repository
        chat_template (str | None): Jinja file that renders messages, in place of the tokenizer's own
        chat_template_kwargs (str | Mapping[str, Any] | None): JSON object of variables for the chat template, as in training
        chat (bool): --prompts are a user's messages, rendered by the chat template
        max_new_tokens (int): tokens of an answer at most
        do_sample (bool): draw tokens instead of taking the most probable one
        temperature (float): divides the logits, with --do_sample
        top_p (float): draw from the most probable tokens up to this sum
        top_k (int): draw from so many of the most probable tokens; 0: all
        num_return_sequences (int): answers to each prompt, with --do_sample
        allow_image_urls (bool): read pictures of rows from the network where they are http(s) addresses
        max_image_pixels (int): most pixels of a picture, which is refused before it is decoded
        image (str | Sequence[str]): files of pictures in front of each of --prompts, or where it has <image>
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
        base_bits (Literal[16, 4] | None): bits of the base's weights: 16, or 4 (NF4); by default as the adapter was trained
        max_seq_len (int): longest sequence in tokens; 0: as many as the model has positions
        columns (Sequence[str] | Mapping[str, str]): names of columns, as in prompt=question completion=answer
        dtype (Literal['auto', 'fp32', 'bf16', 'fp16']): compute type; auto: as in training
        per_device_eval_batch_size (int): sequences at a time
        attn_implementation (Literal['auto', 'sdpa', 'eager']): attention kernel of transformers; auto: sdpa where it has it, else eager
        trust_remote_code (bool): run model code that comes with a hub repository
        chat_template (str | None): Jinja file that renders messages, in place of the tokenizer's own
        chat_template_kwargs (str | Mapping[str, Any] | None): JSON object of variables for the chat template, as in training
        reward_model (Model | None): reward model that scores the model's own greedy answers to the prompts
        judge_function (str | object | None): module:function that scores the same answers, as a reward function of step 3 does; builtin:NAME for one that comes along
        max_new_tokens (int): tokens of such an answer at most
        limit (int): rows to take at most, of each task too, the first ones; 0: all
        tasks (str | Sequence[str]): tasks of lm-evaluation-harness, or directories of task files of your own, in place of rows; needs dschat_lora[evaluation]
        num_fewshot (int | None): worked examples before each question of --tasks; default: as the task says
        apply_chat_template (bool): questions of --tasks are a user's messages, rendered by the chat template
        allow_image_urls (bool): read pictures of rows from the network where they are http(s) addresses
        max_image_pixels (int): most pixels of a picture, which is refused before it is decoded
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
        base_bits (Literal[16, 4] | None): bits of the base to add the adapter to: 16, or 4 (NF4); by default those that it was trained on; whole weights are written in any case
        dtype (Literal['auto', 'fp32', 'bf16', 'fp16']): type of the weights written; auto: the base's where it has 16 bits, else bf16
        overwrite_output_dir (bool): replace a model in the output directory
        merge_max_kl (float): refuse a merge that moves the distribution by more (nats per token)
        trust_remote_code (bool): run model code that comes with a hub repository
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
        max_seq_len (int): tokens per row, prompt and completion together
        columns (Sequence[str] | Mapping[str, str]): names of your columns, as in prompt=question completion=answer; with these the prompt is read from the column question, in all data
        eval_data_path (str | os.PathLike[str] | Sequence[str | os.PathLike[str]]): held-out data, never trained on
        packing (bool): fill rows of --max_seq_len with several samples; the mask keeps them apart
        eval_ratio (float): held-out share of the rows where no --eval_data_path is given, in [0, 1)
        data_split_name (str | Sequence[str]): split of each --data_path that is a hub data set or a directory with splits, or one for all; train when absent
        data_weights (float | Sequence[float]): times each --data_path is used per epoch, in its order; 1 each when absent
        max_source_rows (int | Sequence[int]): most rows of each --data_path, its first ones, or one number for all; 0: all
        max_repeats (int | Sequence[int]): times that a row of each --data_path may be used in the whole run at most, or one number for all; 0 or absent: no bound
        data_split (str | None): shares of the rows for steps 1, 2 and 3, such as 2,4,4; every step uses all rows when absent
        data_output_path (str | os.PathLike[str] | None): cache of tokenised data; default ~/.cache/dschat_lora
        overlong (Literal['split', 'drop', 'truncate', 'error']): what happens to samples longer than --max_seq_len: split cuts rows of `text` into pieces and drops others, drop drops all
        bad_rows (Literal['stop', 'skip']): what happens at a row that cannot be used
        unpaired_rows (Literal['refuse', 'good_only', 'all']): what is learnt of answers with a `label` (rows for KTO): nothing (the run stops), those with label true, or all, whatever the label
        preprocessing_num_workers (int): processes that read and tokenise rows; 0: one for each core, at most 16
        chat_template_kwargs (str | Mapping[str, Any] | None): JSON object of variables for the chat template, such as '{"enable_thinking": false}'; a row's column of this name comes first
        sft_only_data_path (str | os.PathLike[str] | Sequence[str | os.PathLike[str]]): further data used whole in step 1 and in no other step
        train_on_prompt (bool): take the loss on the prompt too, in evaluation as well (as DeepSpeed-Chat, and microsoft/LoRA by --obj jlm)
        train_empty_think (bool): learn the empty thought that a chat template writes for an answer without one, as Qwen3's <think></think>, which teaches not to think
        show (int): samples to show, token by token, with what is supervised
        stage (Literal['sft', 'reward', 'dpo', 'rlhf', 'distill']): what makes samples of the rows: sequences, pairs, or prompts of step 3
        seed (int): of --data_split and --eval_ratio
        chat_template (str | None): file of a Jinja chat template, as in training
        trust_remote_code (bool): run tokenizer code of a hub repository
        add_eot_token (bool): as in training
        eot_token (str): as in training
        near_duplicates (float | None): count rows whose text is near that of an earlier one: with at least this Jaccard similarity, in (0, 1], of their runs of 5 words, as 0.8
        against (str | Sequence[str]): count rows that share a run of --against_ngram words with these evaluation data, named as in --data_path
        against_ngram (int): words of a run; a shorter text is compared as a whole
        language_rows (int): rows, drawn by --seed, whose languages are counted; 0: none, 1000 says enough
        kept_path (str | os.PathLike[str] | None): .jsonl file for the rows that can be used and are neither duplicates nor, where these are counted, near duplicates or rows of --against
        overwrite_kept_path (bool): replace a file that is at --kept_path
        streaming (bool): read, tokenise and pack rows while training, at bounded memory, in place of preparing all of them before; needs --max_steps
        shuffle_buffer_size (int): rows that --streaming shuffles and packs at a time, besides shards' order
        allow_image_urls (bool): read pictures of rows from the network where they are http(s) addresses
        max_image_pixels (int): most pixels of a picture, which is refused before it is decoded
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
    """Find the learning rate of a stage and, if you like, its rank and batch, by short runs.

    Needs ``dschat_lora[planning]``. Runs are processes of their own; call it from the main thread.

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
            trust_remote_code (bool): run model code that comes with a hub repository
            add_eot_token (bool): add --eot_token to the tokenizer and end every completion with it
            eot_token (str): end-of-text token of --add_eot_token
            chat_template (str | None): Jinja file that renders messages, in place of the tokenizer's own; saved with the result
            dropout (float): every dropout probability of the base model, in [0, 1)
            rope_scaling (str | None): JSON object by which rotary position embeddings reach longer rows, in transformers' words, such as '{"rope_type": "yarn", "factor": 4.0}' (or linear, llama3); default: that with which the adapter that is loaded was trained, else the model's own
            per_device_train_batch_size (int): rows per device and micro-batch; of several samples if packed, else of one
            seed (int): seed of initialisation, order and sampling
            loraplus_lr_ratio (float): rate of lora_B over that of lora_A (LoRA+); 1 treats them alike
            adam_beta1 (float): decay of the gradient's mean
            adam_beta2 (float): decay of the gradient's square
            adam_epsilon (float): added to the root of the second moment
            max_grad_norm (float): gradients are clipped to this norm; 0: never
            weight_decay (float): decoupled weight decay; biases and norms exempt
            lora_dim (int | None): rank of the adapters; 0 trains every weight; default: 16 (training/ and --config: 0); the 0 is of the scripts of training/; by default an adapter that is continued keeps its rank
            lora_alpha (float): the update is scaled by lora_alpha / lora_dim
            target_modules (str | Sequence[str]): layers to adapt: all-linear, name endings, or one regular expression
            lora_dropout (float): dropout on the adapter's input, in [0, 1)
            use_rslora (bool): scale by lora_alpha / sqrt(lora_dim) (rank-stabilised LoRA)
            train_bias (Literal['none', 'all', 'lora_only']): biases to train: none, all, or those of adapted layers
            modules_to_save (str | Sequence[str]): name endings of modules to train in full and save with the adapter
            enable_lora (str | Sequence[str]): q, k, v: the parts of a packed projection that get factors of their own; the layer has one pair for all of it when absent
            expert_lora_dim (int | None): rank of each expert's update in a mixture of experts; 0 leaves experts frozen; default: lora_dim over the experts that a token is sent to, at least 1
            expert_lora_alpha (float | None): the update of an expert is scaled by this over its rank; default: lora_alpha
            only_optimize_lora (bool): freeze the base model when lora_dim > 0 (no-: train it too)
            per_device_eval_batch_size (int): rows per device in evaluation
            base_bits (Literal[16, 4] | None): bits of the frozen base: 16, or 4 (QLoRA); default: the loaded adapter's, else 16; 4 is NF4, for linear layers and experts of the blocks; an adapter's are those with which it was trained
            zero_stage (Literal[0, 1, 2, 3] | None): ZeRO: 1 shards optimizer state, 2 gradients too, 3 weights too; default: 0; over processes; default: what --deepspeed_config says, where it is given
            gradient_checkpointing (bool | Literal['auto']): recompute activations to save memory; auto: where they would not fit; in the backward pass, instead of keeping them; without a value on; auto goes by an estimate, and on a GPU divides micro-batches whose size is not given, where that is faster
            deepspeed_config (str | os.PathLike[str] | Mapping[str, Any] | None): DeepSpeed JSON such as configs/ds/zero2.json; "auto" fields are filled in
            dtype (Literal['auto', 'fp32', 'bf16', 'fp16']): compute type; auto: bf16 where the GPU has it, fp16 on older GPUs, fp32 on CPU
            offload_activations (bool): keep the inputs of recomputed blocks in pinned host memory until the backward pass wants them; turns --gradient_checkpointing auto on
            offload (bool): keep optimizer state (and, at stage 3, weights) in host memory
            tensor_parallel_size (int): processes that hold one model between them, each a part of every layer; they see the same data
            sequence_parallel (bool): with --tensor_parallel_size above 1: between the layers each process keeps its share of the tokens alone
            distributed_timeout (float): seconds after which a process that is not heard of ends the run (300 at least until the first step is over)
            attn_implementation (Literal['auto', 'sdpa', 'flex_attention', 'eager']): attention kernel; auto: sdpa where the architecture has it, else eager; sdpa computes each sequence of a row alone where it can, flex_attention is for GPUs where it cannot
            lora_module_name (str | None): adapt the linear layers whose name contains this (DeepSpeed-Chat's rule)
        """
