"""The trained state of an engine, by parameter name, whole and in fp32 at every ZeRO stage.

Three tensors belong to each trained parameter: ``weight:NAME``, and AdamW's moments
``exp_avg:NAME`` and ``exp_avg_sq:NAME`` once it has stepped. DeepSpeed keeps them in flat
pieces, cut by rank and stage; nothing of that shows here.
"""

from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dschat_lora.engine.build import TrainEngine
from dschat_lora.engine.distributed import broadcast_, data_group, data_rank, rank
from dschat_lora.engine.zero import own_shard, tensor_shard, whole_of_parts

MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class EngineState:
    """The trained part of an engine, to be saved and restored. Call methods on every rank."""

    def __init__(self, engine: TrainEngine[nn.Module], model: nn.Module) -> None:
        """Name what ``engine`` trains as ``model``, which it holds, does."""
        self._engine = engine
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        # id of a parameter -> the tensor AdamW updates for it on this rank: for every stage that
        # cuts any piece of the group, whose step is the group's.
        self._flats: dict[int, Tensor] = {id(p): p for p in self._parameters.values()}
        if engine.zero_stage > 0:
            names = ("bit16_groups", "single_partition_of_fp32_groups")
            if engine.zero_stage == 3:
                names = ("fp16_groups", "fp32_partitioned_groups_flat")
            groups, flats = (getattr(engine.optimizer, name) for name in names)
            pairs = zip(groups, flats, strict=True)
            self._flats = {id(p): flat for group, flat in pairs for p in group}

    def facts(self) -> dict[str, Any]:
        """What is no tensor: optimizer steps of each parameter, and the loss scaler. JSON-ready.

        At ZeRO 1 to 3 all parameters of a group have made the same number of steps. Skipped
        steps are not counted.
        """
        scaler = self._engine.loss_scaler
        scale = None
        if scaler is not None and scaler.dynamic:
            scale = {name: getattr(scaler, name) for name in _SCALER_FIELDS}
        return {"optimizer_steps": self._steps(), "loss_scaler": scale}

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(key, fp32 copy on CPU) one after another on rank 0; nothing on the others.

        One tensor is whole at a time.
        """
        for name, steps in self._steps().items():
            keys = ("weight", *MOMENTS) if steps else ("weight",)
            for key in keys:
                parameter = self._parameters[name]
                full = whole_of_parts(parameter, self._gather(parameter, key))
                if rank() == 0:
                    yield f"{key}:{name}", full.to("cpu", torch.float32, copy=True)

    @torch.no_grad()
    def load(self, facts: dict[str, Any], read: Callable[[str], Tensor]) -> None:
        """Become what was saved, bit for bit.

        ``facts`` of :meth:`facts` are the same on every rank; ``read`` gives the tensor of a key,
        and is called on rank 0 alone.

        Raises:
            ValueError: if the trained parameters are not those of ``facts``, or a tensor has
                another shape.
        """
        steps: dict[str, int] = facts["optimizer_steps"]
        check_same_names(self._parameters, steps)
        self._make_room(steps)
        for name, parameter in self._parameters.items():
            for key in ("weight", *MOMENTS) if steps[name] else ("weight",):
                shard = tensor_shard(parameter)
                # Whole, also where ZeRO 3 holds a flat shard, or a tensor-parallel rank a part.
                shape = getattr(parameter, "ds_shape", parameter.shape)
                shape = shape if shard is None else shard.full_shape(shape)
                value = torch.empty(shape, device=self._engine.device)
                if rank() == 0:
                    saved = read(f"{key}:{name}")
                    if saved.shape != value.shape:
                        raise ValueError(
                            f"the checkpoint's {key}:{name} has shape {list(saved.shape)}, not "
                            f"{list(value.shape)}; resume with the options it was written with"
                        )
                    value.copy_(saved)
                whole = broadcast_(value)
                self._set(parameter, key, whole if shard is None else shard.own(whole))
        scaler, scale = self._engine.loss_scaler, facts["loss_scaler"]
        if scaler is not None and scaler.dynamic and scale is not None:
            for name in _SCALER_FIELDS:
                setattr(scaler, name, scale[name])

    def _steps(self) -> dict[str, int]:
        """AdamW's own count of each parameter."""
        states = {n: self._adam_state(p) for n, p in self._parameters.items()}
        return {name: int(state["step"]) if state else 0 for name, state in states.items()}

    def _adam_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """AdamW's tensors for a parameter: its own at ZeRO 0, else those of a flat piece."""
        return self._engine.adam.state.get(self._flats[id(parameter)], {})

    def _make_room(self, steps: dict[str, int]) -> None:
        """Give AdamW the moments it makes at its first step, and its count of steps."""
        for state in self._engine.adam.state.values():  # of steps that were made here
            for tensor in state.values():
                tensor.zero_()
        for name, parameter in self._parameters.items():
            flat = self._flats[id(parameter)]
            state = self._engine.adam.state[flat] if steps[name] else None
            if state == {}:
                state["step"] = torch.tensor(0.0, device=flat.device)  # where fused AdamW wants it
                state.update({key: torch.zeros_like(flat) for key in MOMENTS})
            if state is not None:
                state["step"].fill_(max(float(state["step"]), steps[name]))

    def _gather(self, parameter: nn.Parameter, key: str) -> Tensor:
        """This tensor-parallel rank's tensor, in its own type.

        On the first data-parallel ranks; on others of no use.
        """
        if self._engine.zero_stage == 0:
            return self._plain(parameter, key)
        if self._engine.zero_stage == 3:
            if key == "weight":
                return deepspeed.utils.safe_get_full_fp32_param(parameter)
            return deepspeed.utils.safe_get_full_optimizer_state(parameter, key)
        # DeepSpeed's own function adds the ranks' pieces as numbers, which loses the sign of
        # zeros; added as bits they come through.
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=self._engine.device)
        if (piece := self._fragment(parameter, key)) is not None:
            start, values = piece
            whole[start : start + values.numel()] = values.to(whole.device)
        dist.reduce(whole.view(torch.int32), group=data_group(), group_dst=0)
        return whole.view(parameter.shape)

    def _plain(self, parameter: Tensor, key: str) -> Tensor:
        """The tensor itself, at ZeRO 0."""
        return parameter if key == "weight" else self._adam_state(parameter)[key]

    def _fragment(self, parameter: Any, key: str) -> tuple[int, Tensor] | None:
        """(offset in the flat parameter, this rank's piece) at ZeRO 1 and 2, if it has one."""
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        piece = mapping.hp_fragment
        if key != "weight":
            # DeepSpeed's own link to the moments is made before all groups have any.
            place = mapping.hp_fragment_address
            piece = self._adam_state(parameter)[key][place.start : place.start + place.numel]
        return mapping.lp_fragment_address.start, piece

    def _set(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        """Overwrite with ``value``, which every rank holds whole."""
        stage = self._engine.zero_stage
        if stage == 0:
            self._plain(parameter, key).copy_(value)
        elif stage == 3:
            shard = own_shard(parameter, value)
            if key != "weight":
                deepspeed.utils.safe_set_local_optimizer_state(parameter, shard, key)
                return
            deepspeed.utils.safe_set_local_fp32_param(parameter, shard)
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if data_rank() == 0:
                    parameter.copy_(value)
        else:
            if (piece := self._fragment(parameter, key)) is not None:
                start, values = piece
                values.copy_(value.flatten()[start : start + values.numel()])
            if key == "weight":
                parameter.copy_(value)


def check_same_names(now: dict[str, Any], then: dict[str, Any]) -> None:
    """Refuse state of other parameters.

    Raises:
        ValueError: naming a parameter that only one of the two has.
    """
    only_now, only_then = sorted(now.keys() - then.keys()), sorted(then.keys() - now.keys())
    if only_now or only_then:
        which = f"lacks {only_now[0]}" if only_now else f"holds {only_then[0]}"
        count = len(only_now) + len(only_then)
        raise ValueError(
            f"the checkpoint {which}: other parameters train now ({count} differ); "
            "resume with the options it was written with"
        )
