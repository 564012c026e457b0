"""Training engines over DeepSpeed that step alike at every ZeRO stage."""

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler, LossScalerBase
from deepspeed.utils import logger as deepspeed_logger
from torch import Tensor, nn

from dschat_lora.engine.distributed import data_world_size, destroy_at_shutdown, device, grid
from dschat_lora.engine.ds_config import engine_config, loss_scaling, zero_options
from dschat_lora.engine.results import read_later
from dschat_lora.engine.zero import free_between_passes, gather_with_parents

NetworkT = TypeVar("NetworkT", bound=nn.Module, covariant=True)

deepspeed_logger.setLevel(logging.ERROR)
# DeepSpeed calls collectives by names that torch has since renamed, and torch warns every time.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
# Elements that ranks sum at once at ZeRO 0, where a copy of them is made: 400 MB in fp32.
BUCKET_SIZE = 100_000_000
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Updates tensors and moments in place; see :func:`dschat_lora.algos.adamw.adamw_`.
Update = Callable[..., None]


def resolve_dtype(name: str) -> str:
    """``auto`` as what this machine computes best: bf16, fp16 on older GPUs, fp32 on CPU."""
    if name != "auto":
        return name
    if device().type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


@dataclass(frozen=True)
class StepOutcome:
    """What one optimizer step did."""

    grad_norm: float  # L2 norm of the whole gradient before clipping; inf if skipped
    skipped: bool  # the gradient was not finite, and no weight changed
    loss_scale: float  # the factor the loss was multiplied by; 1 unless the type is fp16


class TrainEngine(Generic[NetworkT]):
    """Forward, backward and step of a network over DeepSpeed, alike at every ZeRO stage.

    The caller says which micro-batch ends the step, so that a short last window of an epoch
    is a step like any other. Gradients are sums over ranks of what ``backward`` was given,
    divided by nothing.

    Where every trained tensor is fp32 (adapters on a frozen 16-bit base) DeepSpeed runs its
    fp32 path, and fp16's loss scale is attached here: stages 0 to 3 then differ by rounding
    alone. Where 16-bit weights train, DeepSpeed keeps their fp32 masters, at stage 1 or above:
    its stage 0 wraps torch's AdamW in an optimizer with another trajectory.
    """

    def __init__(
        self, model: NetworkT, groups: list[dict[str, Any]], settings: "EngineSettings"
    ) -> None:
        self.settings = settings
        self.device = device()
        self._parameters = [p for group in groups for p in group["params"]]
        native = settings.native_dtype(self._parameters)
        if native == "fp16" and self.device.type == "cpu":
            raise ValueError(
                "--dtype fp16 on CPU supports adapters only; use --lora_dim > 0, or --dtype bf16"
            )
        self.zero_stage = settings.stage_in_use(native)
        self.adam = settings.optimizer(groups)
        self._peak_rates = [float(group["lr"]) for group in self.adam.param_groups]
        self.group_names = [group.get("name", "") for group in self.adam.param_groups]
        if self.zero_stage == 3:
            free_between_passes(model)
            gather_with_parents(model)
        self._engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=self.adam,
            config=settings.deepspeed(self.zero_stage, native),
            dist_init_required=False,
            mpu=grid(),
        )
        destroy_at_shutdown(self._engine)
        if self.zero_stage == 0:
            self._engine.enable_backward_allreduce = False  # see _average_gradients
        self._scaler = self._attach_scaler() if native is None else None
        if native == "fp16":
            self.optimizer.loss_scaler.raise_error_at_min_scale = False

    @property
    def module(self) -> NetworkT:
        """The network, whose parameters may be sharded."""
        return self._engine.module

    @property
    def deepspeed(self) -> deepspeed.DeepSpeedEngine:
        """DeepSpeed's engine, which :func:`destroy_engines` takes."""
        return self._engine

    @property
    def optimizer(self) -> Any:
        """DeepSpeed's optimizer around ``adam``; at ZeRO 0 ``adam`` itself."""
        return self._engine.optimizer

    @property
    def loss_scaler(self) -> LossScalerBase | None:
        """What scales fp16 losses; None where nothing does."""
        if self._scaler is None and self.zero_stage > 0:
            return getattr(self.optimizer, "loss_scaler", None)
        return self._scaler

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """The model's forward."""
        return self._engine(*args, **kwargs)

    def train(self) -> None:
        self._engine.train()

    def eval(self) -> None:
        self._engine.eval()

    def set_rates(self, factor: float) -> dict[str, float]:
        """Set every group to ``factor`` times its peak rate; returns the rates by group name."""
        groups = self.optimizer.param_groups
        for group, peak in zip(groups, self._peak_rates, strict=True):
            group["lr"] = peak * factor
        return {n: g["lr"] for n, g in zip(self.group_names, groups, strict=True)}

    @property
    def repeats_forward(self) -> bool:
        """Whether a forward pass that failed can be made again, by this process alone.

        At ZeRO 3, and where processes hold one model between them, others take part in it.
        """
        # DeepSpeed's own clocks run on, and refuse to be started twice.
        timed = self._engine.wall_clock_breakdown() or self._engine.flops_profiler_enabled()
        return self.zero_stage < 3 and grid() is None and not timed

    @property
    def repeats_backward(self) -> bool:
        """Whether those since the last step can be made again, after :meth:`forget_gradients`.

        From ZeRO 1 on DeepSpeed has put gradients into buckets, and may have sent some.
        """
        return self.zero_stage == 0 and self.repeats_forward

    def forget_gradients(self) -> None:
        """Be as before the first backward pass since the last step; at ZeRO 0 alone."""
        assert self.zero_stage == 0
        for parameter in self._parameters:
            parameter.grad = None

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of ``loss`` summed over ranks; ``last`` ends the step's window."""
        self._engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over ranks; losses here are sums.
        loss = loss * data_world_size()
        if self._scaler is not None and self.zero_stage == 0:
            loss = loss * self._scaler.cur_scale
        self._engine.backward(loss, scale_wrt_gas=False)

    def step(self) -> StepOutcome:
        """Clip and update, or skip if the gradient is not finite; call on every rank."""
        return self.queue_step()()

    def queue_step(self) -> Callable[[], StepOutcome]:
        """As :meth:`step`, but what it returns waits for the outcome, once it is called.

        At ZeRO 0 a GPU is given all of the step before anything is read from it, so that a
        second engine's step, or the next one, can be queued behind it; where losses are scaled
        the outcome is to be read before the next backward pass. Call on every rank.
        """
        if self.zero_stage == 0:
            return self._plain_step()
        scale = float(self.optimizer.loss_scale)
        self._engine.step()
        skipped = bool(self.optimizer.overflow)
        norm = math.inf if skipped else float(self._engine.get_global_grad_norm())
        if self.zero_stage == 3:
            # deepspeed 0.19 copies into the gradient shards only in a window's first backward and
            # adds in later ones: a parameter unused in the first would otherwise meet the previous
            # window's gradient.
            self.optimizer.grad_partitions_flat_buffer.zero_()
        return lambda: StepOutcome(norm, skipped, scale)

    def _average_gradients(self) -> None:
        """Make every gradient the ranks' mean, in few and large pieces, and 0 where unused.

        DeepSpeed's own way at ZeRO 0 copies the gradients back one by one.
        """
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)  # as ZeRO 1 to 3 take it
        if data_world_size() == 1:
            return
        for bucket in _buckets(self._parameters, BUCKET_SIZE):
            gradients = [p.grad for p in bucket if p.grad is not None]  # each has one
            mean = self._engine.allreduce_bucket(gradients, self._engine.seq_data_parallel_group)
            torch._foreach_copy_(gradients, self._engine.unflatten(mean, gradients))

    def _plain_step(self) -> Callable[[], StepOutcome]:
        self._average_gradients()
        scale = 1.0 if self._scaler is None else float(self._scaler.cur_scale)
        norm = self._grad_norm() / scale
        limit = self.settings.max_grad_norm
        # DeepSpeed's own formula, so that clipped runs agree over the stages.
        excess = ((norm + 1e-6) / limit).clamp(min=1.0) if limit > 0 else torch.ones_like(norm)
        # AdamW divides by the one, and does nothing, nor counts a step, where the other is 1.
        self.adam.grad_scale = excess * scale  # type: ignore[attr-defined]
        self.adam.found_inf = 1.0 - norm.isfinite().float()  # type: ignore[attr-defined]
        self._engine.step()
        read = read_later(norm)

        @cache
        def outcome() -> StepOutcome:
            value = float(read())
            skipped = not math.isfinite(value)
            if self._scaler is not None:
                self._scaler.update_scale(skipped)
            return StepOutcome(math.inf if skipped else value, skipped, scale)

        return outcome

    def _grad_norm(self) -> Tensor:
        """Of all gradients as one vector, every element of the whole model counted once."""
        norms = torch.stack(torch._foreach_norm([p.grad for p in self._parameters]))
        if (ranks := grid()) is None:
            return torch.linalg.vector_norm(norms)
        squares = norms.double().square()
        divided = [bool(getattr(p, "tensor_model_parallel", False)) for p in self._parameters]
        parts = torch.tensor(divided, device=squares.device)
        total = torch.where(parts, squares, 0.0).sum()
        dist.all_reduce(total, group=ranks.tensor_group)
        return (total + torch.where(parts, 0.0, squares).sum()).sqrt().float()

    def _attach_scaler(self) -> LossScalerBase | None:
        """A dynamic loss scale for fp16 compute with fp32 trained tensors, else None."""
        if self.settings.dtype != "fp16":
            return None
        options = loss_scaling(self.settings.deepspeed_json)
        if options["loss_scale"]:
            scaler = LossScaler(float(options["loss_scale"]))
        else:
            scaler = DynamicLossScaler(
                init_scale=2.0 ** options["initial_scale_power"],
                scale_window=options["loss_scale_window"],
                min_scale=options["min_loss_scale"],
                delayed_shift=options["hysteresis"],
                consecutive_hysteresis=False,
                raise_error_at_min_scale=False,  # the training loop says when to give up
            )
        if self.zero_stage > 0:
            self.optimizer.loss_scaler = scaler
            self.optimizer.dynamic_loss_scale = scaler.dynamic
        return scaler


@dataclass(frozen=True)
class EngineSettings:
    """How an engine is built, resolved from options and the DeepSpeed JSON."""

    dtype: str  # compute type: fp32, bf16 or fp16
    zero_stage: int
    offload: bool
    micro_batch_size: int
    accumulation_steps: int
    max_grad_norm: float
    betas: tuple[float, float]
    epsilon: float
    deepspeed_json: Mapping[str, Any]
    shares_weights: bool = False  # with another engine, on one frozen base
    update: Update | None = None  # in place of torch's AdamW

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def gathering(self) -> dict[str, int]:
        """What decides how much ZeRO 3 holds whole, in elements; none at other stages."""
        if self.zero_stage < 3:
            return {}
        zero = zero_options(self.deepspeed_json, self.zero_stage, offload=self.offload)
        return {
            "reuse_distance": int(zero["stage3_max_reuse_distance"]),
            "bucket_size": int(zero["reduce_bucket_size"]),
        }

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        if self.update is not None:
            return SteppedAdamW(groups, self.update, betas=self.betas, eps=self.epsilon)
        return torch.optim.AdamW(groups, betas=self.betas, eps=self.epsilon, fused=True)

    def native_dtype(self, trained: Iterable[nn.Parameter]) -> str | None:
        """The 16-bit type whose fp32 masters DeepSpeed has to keep; None if all is fp32."""
        return None if all(p.dtype == torch.float32 for p in trained) else self.dtype

    def stage_in_use(self, native_dtype: str | None) -> int:
        """The ZeRO stage an engine runs at, given :meth:`native_dtype` of what it trains.

        Fp32 masters need stage 1. Without them one process has nothing to shard, and stages 1
        and 2 would but copy every gradient and weight to and fro: stage 0 does the same.
        """
        if native_dtype is not None:
            return max(self.zero_stage, 1)
        shards = self.zero_stage == 3 or self.offload or data_world_size() > 1
        return self.zero_stage if shards else 0

    def deepspeed(self, zero_stage: int, native_dtype: str | None) -> dict[str, Any]:
        return engine_config(
            self.deepspeed_json,
            zero_stage=zero_stage,
            offload=self.offload,
            micro_batch_size=self.micro_batch_size,
            accumulation_steps=self.accumulation_steps,
            max_grad_norm=self.max_grad_norm,
            native_dtype=native_dtype,
            shares_weights=self.shares_weights,
        )


def _buckets(parameters: Iterable[nn.Parameter], size: int) -> Iterator[list[nn.Parameter]]:
    """The parameters in turn, in lists of at most ``size`` elements where one is not larger."""
    bucket: list[nn.Parameter] = []
    filled = 0
    for parameter in parameters:
        if bucket and filled + parameter.numel() > size:
            yield bucket
            bucket, filled = [], 0
        bucket.append(parameter)
        filled += parameter.numel()
    yield bucket


class SteppedAdamW(torch.optim.Optimizer):
    """AdamW whose update is given as a function, with the state of torch's own."""

    grad_scale: Tensor | None = None  # gradients are to be divided by it
    found_inf: Tensor | None = None  # not 0 where the step is to be left out

    def __init__(
        self,
        groups: list[dict[str, Any]],
        update: Update,
        *,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(groups, {"lr": 1e-3, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._update = update

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        if self.found_inf is not None and bool(self.found_inf):
            return
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            states = [self.state[p] for p in parameters]
            for parameter, state in zip(parameters, states, strict=True):
                if not state:
                    zeros = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                    state.update(step=torch.tensor(0.0), **zeros)
            gradients = [p.grad for p in parameters]
            if self.grad_scale is not None:
                gradients = [g / self.grad_scale for g in gradients]
            for state in states:
                state["step"] += 1
            self._update(
                parameters,
                gradients,
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                step=int(states[0]["step"]),
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
            )
