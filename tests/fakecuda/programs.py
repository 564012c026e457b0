"""What is run on the fake device; each returns what was noted, ready for JSON."""

import contextlib
import json
import os
import runpy
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import bitsandbytes  # noqa: F401 - binds what torch has of CUDA as it is imported
import deepspeed  # noqa: F401 - imported once, before the forks
import torch
from deepspeed.runtime.zero import partition_parameters, stage3, stage_1_and_2  # noqa: F401
from deepspeed.runtime.zero.muon import muon_optimizer  # noqa: F401 - compiles as it is imported

from benchmarks.common import shapes
from dschat_lora.config.groups import LoraConfig, OptimConfig, RunConfig
from dschat_lora.engine import gpu
from dschat_lora.engine.build import DTYPES, resolve_dtype
from dschat_lora.engine.distributed import device
from dschat_lora.generation.generate import Decoder
from dschat_lora.generation.sampling import Sampling
from dschat_lora.generation.slots import SlotRows
from dschat_lora.lora.model import apply_lora
from dschat_lora.models.backbone import Backbone
from dschat_lora.models.blocks import compile_blocks, offload_inputs, recompute_blocks
from dschat_lora.models.loading import share_parameters
from dschat_lora.perf.memory import estimate_memory
from dschat_lora.perf.throughput import Meter
from dschat_lora.report.log import RunLog
from dschat_lora.rl.loop.memory import cache_bytes, decoding_by_memory
from dschat_lora.runtime.graphs import record_training
from dschat_lora.runtime.memory import MemoryPlan
from dschat_lora.supervised.loop import TrainProgress, fit, make_train_schedule
from dschat_lora.supervised.objectives import SUPERVISED
from fakecuda.device import fake_cuda
from helpers.addons import of_addon
from helpers.engines import make_engine
from helpers.roles import config_of
from helpers.runs import NoKeeper, loader
from helpers.steps import train_steps
from helpers.tensor_parallel import divided

CUDA = torch.device("cuda", 0)


def noted(watch):
    """What the watch has counted."""
    return {
        "waits": {f"{what}  {line}": n for (what, line), n in watch.waits.most_common()},
        "late_reads": dict(watch.late_reads),
        "products": {f"{name} {dtype}": n for (name, dtype), n in watch.products.items()},
        "moved": [[*key, watch.collectives[key], count] for key, count in watch.moved.items()],
        "copied": dict(watch.copied),
        "launches": watch.launches,
        "operations": dict(watch.operations),
        # But for steps of decoding, whose masks have one row.
        "plans": sum(mask is None or mask[2] > 1 for _, _, _, mask, *_ in watch.plans),
        "graphs": len(watch.graphs),
        "replays": watch.replays,
        "graph_operations": [sum(operations.values()) for operations in watch.graphs],
        "graph_kinds": dict(sum(watch.graphs, Counter())),
        "peak": watch.peak,
        "alive_at_peak": watch.alive_at_peak(),
    }


def train(
    shape,
    *,
    layers=None,
    lora_dim=16,
    base_bits=16,
    rows=16,
    length=512,
    sample=512,
    packed=False,
    dtype="bf16",
    card="h200",
    zero_stage=0,
    world_size=1,
    recompute=False,
    tensor_parallel=1,
    sequence_parallel=False,
    accumulation=1,
    offload=False,
    offload_activations=False,
    attention="sdpa",
    compiled=False,
    experts=None,
    recorded=False,
    steps=2,
):
    """The last of some optimizer steps of the engine and the loop, and the estimate of memory.

    ``by_step`` has of each step launches, captured graphs and replays. With ``recorded`` passes,
    micro-batches come in turn with one of a single row.
    """
    size = replace(
        shapes.SHAPES[shape],
        num_layers=layers or shapes.SHAPES[shape].num_layers,
        lora_dim=lora_dim,
        base_bits=base_bits,
        rows=rows * accumulation,
        row_length=length,
        max_sample=min(length, sample),
    )
    size = size if experts is None else replace(size, experts=(experts, size.experts[1]))
    samples = shapes.mixed_rows(size) if packed else shapes.full_rows(size)
    batches = shapes.micro_batches(samples, rows * length)
    with (
        fake_cuda(card, world_size=world_size) as watch,
        divided(tensor_parallel, sequence_parallel=sequence_parallel) as group,
    ):
        watch.truth = False  # no norm is infinite, or DeepSpeed would skip the step
        model = shapes.random_model(size, dtype=DTYPES[dtype], device=CUDA, group=group)
        if recompute:
            recompute_blocks(model)
        if offload_activations:
            offload_inputs(model)
        model.set_attn_implementation(attention)
        model.train()
        engine = make_engine(
            model,
            dtype=dtype,
            zero_stage=zero_stage,
            rows=rows,
            accumulation_steps=len(batches),
            offload=offload,
        )
        if compiled:
            compile_blocks(model)
        if recorded:
            record_training(engine.module, model)
            batches += shapes.micro_batches(samples[:1], rows * length)
        made = train_steps(engine, [batches] * steps, SUPERVISED, [1.0] * steps)
        by_step = []
        for _ in range(steps):  # the first makes the optimizer's state
            watch.start()
            resident = watch.live
            next(made)
            by_step.append([watch.launches, len(watch.graphs), watch.replays])
        count, longest = max((b.input_ids.shape for b in batches), key=lambda s: s.numel())
        estimate = estimate_memory(
            model,
            rows=count,
            length=longest,
            compute_dtype=DTYPES[dtype],
            gradient_checkpointing=recompute,
            zero_stage=zero_stage,
            world_size=world_size // tensor_parallel,
            offload=offload,
            offload_activations=offload_activations,
            accumulates=len(batches) > 1,
            mask_bytes=Backbone(model).mask_bytes(
                CUDA, length=longest, recomputes=recompute, sharded=zero_stage == 3
            ),
        )
        more = {
            "estimate": vars(estimate),
            "estimated": estimate.total,
            "by_step": by_step,
            "resident": resident,
        }
        return noted(watch) | more


def train_on(
    shape, *, layers, steps, dtype="bf16", card="h200", zero_stage=0, world_size=1, save_interval=0
):
    """What a run of so many steps waits for, from its first step to its end, where it evaluates."""
    size = replace(shapes.SHAPES[shape], num_layers=layers, rows=4, row_length=512, max_sample=512)
    with (
        fake_cuda(card, world_size=world_size) as watch,
        tempfile.TemporaryDirectory() as directory,
    ):
        watch.truth = False
        model = shapes.random_model(size, dtype=DTYPES[dtype], device=CUDA)
        model.train()
        engine = make_engine(
            model, dtype=dtype, zero_stage=zero_stage, rows=2, accumulation_steps=2
        )
        samples = [sample for row in shapes.full_rows(size) for sample in row] * steps
        source = loader(samples, micro=2, accumulation=2)
        optim = OptimConfig(max_steps=steps)
        saved, progress = [], TrainProgress()
        keeper = NoKeeper()
        keeper.is_due = lambda step: save_interval and step % save_interval == 0
        keeper.after_step = lambda step, *_, **__: saved.append(step)
        with RunLog(Path(directory), active=True) as log:
            fit(
                engine,
                source,
                SUPERVISED,
                make_train_schedule(optim, RunConfig(), source.steps_per_epoch),
                progress=progress,
                rate_factor=lambda step: 1.0,
                seed=1,
                checkpointer=keeper,
                meter=Meter(None, gradient_checkpointing=False, world_size=1, device=CUDA),
                log=log,
                evaluate_at=lambda step: step or watch.start(),
            )
        lines = (Path(directory) / "metrics.jsonl").read_text().splitlines()
        told = [json.loads(line)["step"] for line in lines]
        return noted(watch) | {"steps": told, "saved": saved}


def decode(
    shape,
    *,
    layers=None,
    lora_dim=16,
    rows=8,
    copies=1,
    length=256,
    new_tokens=128,
    dtype="bf16",
    card="h200",
    merged=False,
    calls=2,
    anew=False,
    experts=None,
    base_bits=16,
):
    """Each of some calls of one decoder, or of one decoder ``anew`` for each.

    It has so many ``rows``, each ``copies`` of them responses to one prompt.
    """
    size = shapes.SHAPES[shape]
    size = replace(
        size,
        lora_dim=lora_dim,
        num_layers=layers or size.num_layers,
        base_bits=base_bits,
        experts=size.experts if experts is None else (experts, size.experts[1]),
    )
    with fake_cuda(card) as watch:
        model = shapes.random_model(size, dtype=DTYPES[dtype], device=CUDA).eval()
        watch.truth = False  # no sequence ends
        prompts = [list(range(4, 4 + length - n % 9)) for n in range(rows // copies)]
        seeds = [range(n, n + copies) for n in range(len(prompts))]
        kinds = Counter()
        model.get_output_embeddings().register_forward_hook(
            lambda head, inputs, logits: kinds.update([str(logits.dtype).removeprefix("torch.")])
        )
        found, decoder = [], None
        for _ in range(calls):
            watch.start()
            if anew or decoder is None:
                decoder = Decoder(model, eos_ids=[2], pad_id=1, device=device(), merged=merged)
            with warnings.catch_warnings(record=True) as told:
                decoder(prompts, Sampling(new_tokens), seeds=seeds)
            left = [*watch.underway.elements(), *(["stream"] if watch.stream.captures else [])]
            warned, holds = [str(each.message) for each in told], sum(watch.pools.values())
            more = {"warned": warned, "left": left, "holds": holds, "logits": [*kinds]}
            found.append(noted(watch) | more)
        return found


def decode_by_memory(shape, *, card, generations=8, prompt=256, answer=1024, tokens=2):
    """A rollout of 256 responses, as many at a time as a card holds beside the weights."""
    batch = {"per_device_generation_batch_size": 256, "num_generations": generations}
    data = {"max_prompt_seq_len": prompt, "max_answer_seq_len": answer}
    with fake_cuda(card) as watch:
        watch.truth = False  # no sequence ends
        free = torch.cuda.mem_get_info()[0]
        model = shapes.random_model(shapes.SHAPES[shape], dtype=torch.bfloat16, device=CUDA).eval()
        config, weights = replace(config_of(batch=batch, data=data), eval_prompts=0), watch.live
        plan = MemoryPlan(weights, weights, 0, 0, cache_bytes(config, model))
        config, plan = decoding_by_memory(config, plan, model, free=free)
        rows = config.batch.rows_decoded
        decoder = Decoder(
            model, eos_ids=[2], pad_id=1, device=device(), largest=(rows, prompt + answer)
        )
        prompts = [list(range(4, 4 + prompt - n % 9)) for n in range(256 // generations)]
        seeds = [[generations * n + k for k in range(generations)] for n in range(len(prompts))]
        watch.start()
        limits = [tokens] * len(prompts)
        decoder(prompts, Sampling(answer), seeds=seeds, limits=limits, keep_logprobs=True)
        return noted(watch) | {"rows": rows, "planned": plan.peak, "free": free}


def refill(shape, *, layers, rows=8, requests=24, copies=4, new_tokens=48, calls=3):
    """The last of some calls of one decoder with more requests than rows, and sizes of joins."""
    size = replace(shapes.SHAPES[shape], num_layers=layers)
    with fake_cuda("h200") as watch:
        watch.truth = False
        model = shapes.random_model(size, dtype=torch.bfloat16, device=CUDA).eval()
        largest, joined, join = (rows, 100 + new_tokens), [], SlotRows.join
        decoder = Decoder(model, eos_ids=[2], pad_id=1, device=device(), largest=largest)
        groups = range(0, requests, copies)
        prompts = [[4 + n] * (100 - n % 40) for n in groups]
        limits = [1 + (17 * n + 4) % new_tokens for n in groups]
        seeds = [[n + copy for copy in range(copies)] for n in groups]

        def note(slots, prompts, *rest):
            joined.append(len(prompts))
            return join(slots, prompts, *rest)

        with mock.patch.object(SlotRows, "join", note):
            for _ in range(calls):
                watch.start()
                joined.clear()
                decoder(prompts, Sampling(new_tokens), seeds=seeds, limits=limits)
        return noted(watch) | {"joined": joined}


def serve(shape, *, layers, card="h200", adapters=2, steps=40):
    """Steps of three requests, of which the first leaves after ten, with as many adapters."""
    size = replace(shapes.SHAPES[shape], num_layers=layers)
    with fake_cuda(card) as watch, warnings.catch_warnings(record=True) as told:
        watch.truth = False
        model = shapes.random_base(size, dtype=torch.bfloat16, device=CUDA).eval()
        model.requires_grad_(False)
        (mixed,) = of_addon("serving.mixed")
        numbers = mixed.AdapterRows(CUDA)
        copies = [share_parameters(model) for _ in range(adapters)]
        for copy in copies:
            apply_lora(copy, LoraConfig(lora_dim=8), seed=0)
        mixed.mix_adapters(model, copies, rows=numbers)
        rows = SlotRows(model, numbers, pad_id=1)
        with torch.no_grad(), rows.kernels():
            rows.join([[5] * 20, [6] * 30, [7] * 100], [0, 1, adapters])
            watch.start()
            for number in range(steps):
                rows.step([8] * len(rows))
                if number == 9:
                    rows.leave(0)
        warned = [str(each.message) for each in told if "CUDA graphs" in str(each.message)]
        return noted(watch) | {"warned": warned}


def planned(longest, asked):
    """(queries, keys) that cuDNN plans attention for, in calls with such longest prompts."""
    if asked:
        os.environ["TORCH_CUDNN_SDPA_DEPRIORITIZED"] = "0"
    size = replace(shapes.SHAPES["opt-1.3b"], num_layers=1)
    with fake_cuda("h200") as watch:
        watch.truth = False  # no sequence ends
        model = shapes.random_model(size, dtype=torch.bfloat16, device=CUDA).eval()
        largest = (2, max(longest) + 8)
        options = {"eos_ids": [2], "pad_id": 1, "device": device(), "largest": largest}
        decoder = Decoder(model, **options)
        for length in longest:
            decoder([[5] * length, [5]], Sampling(8), seeds=[[0], [1]])
        return sorted({(query[2], key[2]) for query, key, *_ in watch.plans})


def chosen(card):
    """What is chosen on a card where options leave it open, as rows of the documentation."""
    with fake_cuda(card) as watch:
        dtype = resolve_dtype("auto")
        size = replace(shapes.TINY["opt-1.3b"], hidden_size=256)
        model = shapes.random_model(size, dtype=DTYPES[dtype], device=CUDA)
        one_call = Backbone(model).skips_padding(CUDA)
        engine = make_engine(model, dtype=dtype, rows=1, accumulation_steps=1)
        model.eval()
        Decoder(model, eos_ids=[2], pad_id=1, device=CUDA)([[5]], Sampling(4), seeds=[[0]])
        return [
            torch.cuda.get_device_name(),
            dtype,
            "scaled" if engine.loss_scaler is not None else "as it is",
            "variable-length kernel" if one_call else "dense mask",
            "fused" if engine.adam.defaults["fused"] else "plain",
            "CUDA graphs" if watch.graphs else "single operations",
        ]


def stage(script, options, card="h200", world_size=1, memory=None, trial="", truth=True):
    """A stage script, whose files are read and written for real; ``trial`` is the allocator's."""
    with (
        fake_cuda(card, world_size=world_size, memory=memory) as watch,
        mock.patch.object(gpu, "TRIAL", trial),
        contextlib.ExitStack() as stack,
    ):
        watch.number, watch.truth = 0.0, truth
        stack.callback(setattr, sys, "argv", sys.argv)
        sys.argv = [script, *options]
        error = None
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            error = None if end.code in (None, 0) else f"exit {end.code}"
        except BaseException:  # noqa: BLE001 - the caller asserts that there is none
            error = traceback.format_exc()
        allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
        return noted(watch) | {"error": error, "allocator": allocator}


def no_reward(prompts, responses, ended):
    """A reward function to which all responses are equal."""
    return [0.0] * len(responses)
