"""A CUDA device made up of FakeTensors, which notes what a real one would do.

What lies on the host is real (data, files, weights that are read); what lies on "cuda" has a shape,
a type, a device and an owner, but no values. Inside :func:`fake_cuda`, ``torch.cuda`` describes a
card, and a :class:`Watch` sees every operation: waits of the host for the device, live bytes,
operations launched, and those captured in graphs. Wrong values, kernels that refuse a shape,
fragmentation and times are not found this way.

:mod:`fakecuda.shim` must be loaded before torch is imported.
"""

import contextlib
import functools
import os
import sys
import warnings
import weakref
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fakecuda import norms

GIB = 2**30
BLOCK = 512  # bytes; CUDA's allocator rounds up to it
CARDS = {  # name, compute capability, memory in GB
    "h200": ("NVIDIA H200", (9, 0), 141),
    "a100": ("NVIDIA A100-SXM4-80GB", (8, 0), 80),
    "4090": ("NVIDIA GeForce RTX 4090", (8, 9), 24),
    "3090": ("NVIDIA GeForce RTX 3090", (8, 6), 24),
    "t4": ("Tesla T4", (7, 5), 16),
    "3060": ("NVIDIA GeForce RTX 3060", (8, 6), 12),
}
# Operations whose result's shape depends on values: the host waits for them.
VALUE_SHAPED = {
    *("nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "equal")
}
COLLECTIVES = {
    "allreduce_": "all_reduce",
    **dict.fromkeys(
        ("allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_"), "all_gather"
    ),
    **dict.fromkeys(
        ("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
        "reduce_scatter",
    ),
    "broadcast_": "broadcast",
    "reduce_": "reduce",
}
# Waits that ``torch.cuda.set_sync_debug_mode`` does not see.
UNDETECTED = {"synchronize", "event"}
# Operations that draw random numbers only for dropout.
ATTENTION = {f"_scaled_dot_product_{kind}_attention" for kind in ("cudnn", "efficient", "flash")}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addbmm"}
NO_KERNEL = {"empty", "empty_like", "new_empty", "_unsafe_view", "empty_strided"}
# Where the package's own code is, for labels.
ROOTS = ("dschat_lora/", "training/", "tests/fakecuda/", "benchmarks/", "deepspeed/")


def _is_cuda(x):
    """Whether a tensor, a device or the name of one is on the fake device."""
    if isinstance(x, str):
        return x.startswith("cuda")
    return (x if isinstance(x, torch.device) else x.device).type == "cuda"


class Watch(TorchDispatchMode):
    """What is done on the fake device.

    Attributes:
        waits: of the host for the device: (what, line) -> times. Values it waits for are made up:
            ``number``, or for bools ``truth``.
        late_reads: line -> waits for an event behind which the device has more to do, so that it
            does not stand still. given: launches and replays, in the life of the watch.
        launches: operations on the device. operations: the same by name.
        products: (matrix product, type) -> times.
        graphs: the operations of each that was captured. replays: of all of them.
        capturing: the graph that is being captured. underway: captures that the allocator takes
            for unfinished, as torch leaves them where the end of one fails. pools: handle of a
            memory pool of graphs -> how many hold it.
        stream: the current one. mode: of ``torch.cuda.set_sync_debug_mode``; 1 warns of waits.
        generator: of random numbers.
        plans: shapes that cuDNN has planned attention for, in the life of the process.
        live, peak: bytes of the device's storages. memory: at how many the device is full.
        copied: "cuda->cpu" or "cpu->cuda" -> bytes.
        moved: (collective, ranks) -> bytes of the whole tensors: what is summed or spread, or
            what the ranks' parts make. collectives: the same -> times.
    """

    supports_higher_order_operators = True

    def __init__(self, capability):
        super().__init__()
        self.capability, self.truth, self.number = capability, True, 1.0
        self.waits, self.products, self.moved = Counter(), Counter(), Counter()
        self.operations, self.collectives, self.copied = Counter(), Counter(), Counter()
        self.late_reads: Counter[str] = Counter()
        self.launches = self.replays = self.live = self.peak = self.given = 0
        self.memory = sys.maxsize
        self.graphs: list[Counter] = []
        self.plans = set()
        self.capturing: CUDAGraph | None = None
        self.underway, self.pools, self.mode = Counter(), Counter(), 0
        self.stream, self.generator = Stream(), Generator()
        self._kernels: set[tuple] = set()  # those that have run, by operation, shapes and types
        self._before, self._events = Counter(), []
        self._seen = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.name().split(".")[0].removeprefix("aten::")
        inputs = [
            x
            for x in tree_leaves((args, kwargs))
            if isinstance(x, torch.Tensor | torch.device | str)
        ]
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        if not any(isinstance(x, FakeTensor) or _is_cuda(x) for x in inputs):
            with unset_fake_temporarily():  # the host's own work is real
                if kwargs.pop("pin_memory", False):
                    return _pin(func(*args, **kwargs))
                return func(*args, **kwargs)
        if name == "_local_scalar_dense":
            self.wait("item")
            return self._made_up(tensors[0].dtype)
        if name in VALUE_SHAPED or self._reads_groups(name, tensors):
            self.wait(name)
        if name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1]):
            self.wait("index by a mask")
            args = _index_of_all(args)
        if name in ("_to_copy", "copy_"):
            done, result = self._copy(name, args, kwargs, tensors)
            if done:
                return result
        if name == "_grouped_mm" and args[0].dtype != torch.bfloat16:
            # torch's shapes are of bf16 alone; its kernels take fp16 and fp32 too
            args = [x.bfloat16() for x in args[:2]] + [*args[2:]]
            result = func(*args, **kwargs).to(tensors[0].dtype)
        else:
            result = func(*args, **kwargs)
        self._note(func, name, tensors, result)
        if name.startswith("c10d::") and tensors:
            self._exchanged(name.removeprefix("c10d::"), args)
        return result

    @classmethod
    def ignore_compile_internals(cls):
        """Dynamo may trace under this mode, which sees what is then run."""
        return True

    def _reads_groups(self, name, tensors):
        """Whether the host reads how many rows each group of a grouped product has.

        torch's kernel for bf16 on these cards alone does not (``_grouped_mm_cuda`` of its source).
        """
        if name == "_grouped_mm":
            narrow = all(x.dtype == torch.bfloat16 for x in tensors[:2])
            return not (narrow and self.capability in ((9, 0), (10, 0)))
        return name.startswith("transformers::grouped_mm_fallback")

    def _exchanged(self, name, args):
        group = next(each for each in args if isinstance(each, torch.ScriptObject))
        key = COLLECTIVES[name], dist.ProcessGroup.unbox(group).size()
        given = [[x for x in tree_leaves(each) if isinstance(x, torch.Tensor)] for each in args]
        self.moved[key] += max(sum(x.nbytes for x in each) for each in given)
        self.collectives[key] += 1

    def wait(self, what):
        """Note that the host waits; while a graph is captured CUDA refuses."""
        if self.capturing is not None:
            self.refuse(f"{what} at {_line()}")
        if self.mode and what not in UNDETECTED:
            frame = _frame()
            place = frame.f_code.co_filename, frame.f_lineno
            warnings.warn_explicit("called a synchronizing CUDA operation", UserWarning, *place)
        self.waits[what, _line()] += 1

    def end_pool(self, _, pool):
        if not self.underway[pool]:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway -= Counter([pool])

    def release_pool(self, _, pool):
        self.pools[pool] -= 1  # below 0 where nobody held it; destructors cannot raise

    def empty_cache(self):
        if self.underway:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def refuse(self, what):
        """What CUDA does not capture makes the whole graph invalid."""
        self.capturing.valid = False
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {what}")

    def start(self):
        """Count from here on: all that is counted, and the peak from what is live now."""
        counters = (self.waits, self.products, self.moved, self.collectives, self.operations)
        for counter in (*counters, self.copied, self.late_reads):
            counter.clear()
        self.launches = self.replays = 0
        self.graphs.clear()
        self.reset_peak()

    def reset_peak(self):
        self.peak = self.live
        for size, label in self._events:
            self._before[label] += size
        self._events.clear()

    def alive_at_peak(self, most=12):
        """(bytes, operation and line that made them) of what was alive at the peak."""
        held, highest = Counter(self._before), Counter(self._before)
        live = peak = sum(held.values())
        for size, label in self._events:
            held[label] += size
            live += size
            if live > peak:
                peak, highest = live, Counter(held)
        return [(size, label) for label, size in highest.most_common(most)]

    def _made_up(self, dtype):
        if dtype == torch.bool:
            return self.truth
        if dtype == torch.uint8:  # of DeepSpeed: whether a gradient overflows
            return 0
        return self.number if dtype.is_floating_point else 1

    def _copy(self, name, args, kwargs, tensors):
        """(whether it is done, result) of a copy between host and device."""
        source = args[1] if name == "copy_" else tensors[0]
        to = tensors[0].device if name == "copy_" else kwargs.get("device") or source.device
        to, dtype = torch.device(to), kwargs.get("dtype") or source.dtype
        if source.device.type == to.type:
            return False, None
        way = f"{source.device.type}->{to.type}"
        self.copied[way] += source.numel() * dtype.itemsize
        if not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])):
            self.wait(f"copy {way}")
        elif to.type == "cuda" and not _is_pinned(source):
            self.wait(f"unpinned non_blocking {way}")  # staged by the host
        if to.type == "cpu":
            with unset_fake_temporarily():
                value = torch.full(source.shape, self._made_up(dtype), dtype=dtype)
                return True, args[0].copy_(value) if name == "copy_" else value
        if name == "copy_":
            return True, args[0]
        result = torch.empty_strided(source.shape, source.stride(), dtype=dtype, device=to)
        self._hold(result.untyped_storage(), name)
        return True, result

    def _note(self, func, name, tensors, result):
        tags = getattr(func, "tags", ())  # flex attention has none
        draws = torch.Tag.nondeterministic_seeded in tags and name not in ATTENTION
        if draws and self.capturing is None:
            self.generator.check()
        made = [x for x in tree_leaves(result) if isinstance(x, FakeTensor) and _is_cuda(x)]
        own = name.startswith("dschat_lora::")  # of which some return nothing
        if own or (made and not getattr(func, "is_view", False) and name not in NO_KERNEL):
            self.launches += 1
            self.given += 1
            self.operations[name] += 1
            self._launch(name, [(tuple(x.shape), x.dtype) for x in (*tensors, *made)])
        if name in PRODUCTS:
            self.products[name, str(tensors[-1].dtype).removeprefix("torch.")] += 1
        for each in made:
            self._hold(each.untyped_storage(), name)

    def _launch(self, name, operands):
        kernel = (name, *operands)
        if self.capturing is not None:
            if kernel not in self._kernels:
                self.refuse(f"the first {name} of {operands} at {_line()}")
            self.graphs[-1][name] += 1
        assert self.capturing is not None or not self.stream.captures, (
            f"{name} at {_line()} runs on the stream of a capture that is over"
        )
        self._kernels.add(kernel)

    def _hold(self, storage, name):
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        if storage in self._seen or not size:
            return
        label = f"{name}  {_line()}"
        if self.live + size > self.memory:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {_gib(size)}. GPU 0 has a total capacity "
                f"of {_gib(self.memory)} of which {_gib(self.memory - self.live)} is free."
            )
        self._seen[storage] = weakref.finalize(storage, self._free, size, label)
        self.live += size
        self.peak = max(self.peak, self.live)
        self._events.append((size, label))

    def _free(self, size, label):
        self.live -= size
        self._events.append((-size, label))


def _gib(count):
    return f"{count / GIB:.2f} GiB"


def _index_of_all(args):
    """Arguments of an index by masks as if they kept everything."""
    values, indices = args[0], args[1]
    masks = [x for x in indices if x is not None and x.dtype == torch.bool]
    if masks[0].ndim > 1:
        values = values.flatten(0, masks[0].ndim - 1)
    whole = [
        x.new_zeros(x.numel(), dtype=torch.int64) if x is not None and x.dtype == torch.bool else x
        for x in indices
    ]
    return values, whole


def _frame():
    """The innermost frame that is neither torch's nor of this module."""
    frame = sys._getframe(1)
    while (
        f"{os.sep}torch{os.sep}" in frame.f_code.co_filename or frame.f_code.co_filename == __file__
    ):
        frame = frame.f_back
    return frame


def _line():
    """Innermost line of the package, or of DeepSpeed where there is none, that is being run."""
    frame, place = sys._getframe(1), None
    while frame is not None:
        path = frame.f_code.co_filename
        root = next((r for r in ROOTS if r in path and "fakecuda/device" not in path), None)
        if root is not None:
            where = f"{path[path.rindex(root) :]}:{frame.f_lineno} {frame.f_code.co_name}"
            if root != "deepspeed/":
                return where
            place = place or where
        frame = frame.f_back
    return place or "(autograd)"


def attention_of(capability, watch):
    """``scaled_dot_product_attention`` by the kernel that a card takes.

    torch would ask its CPU build, which takes the products written out. In the order of its
    ``sdp_utils.cpp``: cuDNN, where it is preferred and enabled, flash, memory-efficient attention.
    """
    aten, plain = torch.ops.aten, torch.nn.functional.scaled_dot_product_attention

    def attend(
        query,
        key,
        value,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
        enable_gqa=False,
    ):
        narrow = query.dtype in (torch.float16, torch.bfloat16)
        if query.device.type == "cuda" and narrow and _takes_cudnn(capability, query, key, value):
            shapes = [None if x is None else (*x.shape,) for x in (query, key, value, attn_mask)]
            trains = torch.is_grad_enabled() and query.requires_grad
            watch.plans.add((*shapes, query.dtype, is_causal, trains))
            return aten._scaled_dot_product_cudnn_attention(
                query, key, value, attn_mask, trains, dropout_p, is_causal, False, scale=scale
            )[0]
        if query.device.type != "cuda" or enable_gqa:
            return plain(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        if attn_mask is None and narrow and capability >= (8, 0):
            return aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
        bias = None
        if attn_mask is not None:
            bias = attn_mask
            if bias.dtype == torch.bool:
                bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(~bias, -torch.inf)
            bias = bias.expand(*query.shape[:3], key.shape[2])
        trains = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, trains, dropout_p, is_causal, scale=scale
        )[0]

    return attend


def _takes_cudnn(capability, query, key, value):
    """Whether 16-bit attention is cuDNN's."""
    sizes = (query.shape[-1], value.shape[-1])
    fits = all(size <= 128 and size % 8 == 0 for size in sizes) and key.shape[2] > 1
    return torch.backends.cuda.cudnn_sdp_enabled() and capability[0] in (9, 10) and fits


def move_in_place(module, change, recurse=True):
    """``nn.Module._apply`` that keeps each parameter, which torch would swap for a fake one."""
    moved = {}
    for each in module.modules():
        for store in (each._parameters, each._buffers):
            for key, old in store.items():
                if old is not None:
                    with torch.no_grad():
                        _place(store, key, old, change(old), moved)
    return module


def _place(store, key, old, new, moved):
    if new is old:
        return
    is_parameter = isinstance(old, torch.nn.Parameter)
    if is_parameter:
        new = _parameter_like(old, new)
    if old.is_meta:
        store[key] = moved.setdefault(id(old), new)
    elif isinstance(new, FakeTensor) == isinstance(old, FakeTensor):
        old.data = new
    elif id(old) not in moved:
        moved[id(old)] = old
        _become(old, new)


def _parameter_like(old, value):
    """A parameter of ``value`` with the attributes of ``old``, which would be swapped with it."""
    new = torch.nn.Parameter(value, old.requires_grad)
    new.__dict__.update(old.__dict__)
    return new


def _become(old, new):
    """From the host to the device: the object stays, as optimizers know it."""
    with mock.patch.object(weakref, "getweakrefs", return_value=[]):
        torch.utils.swap_tensors(old, new)


def _data_of(plain):
    """``tensor.data``, which may be set from the host to the device."""

    def set_data(tensor, value):
        if isinstance(value, FakeTensor) and not isinstance(tensor, FakeTensor):
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            new = _parameter_like(tensor, value) if is_parameter else value.view_as(value)
            _become(tensor, new)
        else:
            plain.__set__(tensor, value)

    return property(plain.__get__, set_data)


class Stream:
    """A stream on which everything is done at once.

    Attributes:
        captures: whether a graph was ever captured on it.
    """

    cuda_stream, device, captures = 0, torch.device("cuda", 0), False

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def query(self):
        return True

    def wait_stream(self, *_):
        return None

    wait_event = record_event = synchronize = wait_stream


class StreamContext:
    """``torch.cuda.stream``: what does not leave it leaves its stream the current one."""

    def __init__(self, watch, stream):
        self._watch, self._stream = watch, stream

    def __enter__(self):
        self._before = self._watch.stream
        self._watch.stream = self._stream or self._before

    def __exit__(self, *_):
        self._watch.stream = self._before


def _event_of(watch):
    class Event:
        def __init__(self, *_, **__):
            self._done = watch.given

        def record(self, *_):
            self._done = watch.given

        def query(self):
            return True

        def elapsed_time(self, _):
            return 1.0

        def synchronize(self):
            if watch.given > self._done and watch.capturing is None:
                watch.late_reads[_line()] += 1
            else:
                watch.wait("event")

        def wait(self, *_):
            return None

    return Event


class Generator:
    """A generator of random numbers, whose state takes a failed capture for unfinished.

    torch's up to 2.12 does. A list of one: whether the state is being captured.
    """

    def __init__(self):
        self.state = [False]

    def clone_state(self):
        return Generator()

    def graphsafe_set_state(self, generator):
        self.state = generator.state

    def check(self, state=None):
        if (state or self.state)[0]:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")


class CUDAGraph:
    """A graph whose capture fails as torch's does, which then leaves things as they are.

    ``torch.cuda.graph`` is torch's own.
    """

    def __init__(self, watch):
        self._watch, self._pool, self.valid, self._captured = watch, None, True, False
        self._random = watch.generator.state

    def capture_begin(self, pool, **_):
        watch = self._watch
        if watch.underway:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        self._random[0] = True
        watch.underway[pool] += 1
        watch.pools[pool] += 1
        self._pool, watch.capturing, watch.stream.captures = pool, self, True
        watch.graphs.append(Counter())

    def capture_end(self):
        watch = self._watch
        watch.capturing = None
        if not self.valid:
            watch.graphs.pop()
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture"
            )
        watch.end_pool(0, self._pool)
        self._random[0], self._captured = False, True

    def pool(self):
        if not self._captured:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def replay(self):
        assert self._captured, "replay without a preceding successful capture"
        self._watch.generator.check(self._random)
        self._watch.replays += 1
        self._watch.given += 1

    def reset(self):
        if self._captured:
            self._captured = False
            self._watch.release_pool(0, self._pool)

    __del__ = reset


def _nothing(*_, **__):
    return None


def _each(names, function):
    """name -> a function of its own: torch.compile tells them apart by what they are."""
    return {name: functools.partial(function) for name in names.split()}


def card_module(card, watch):
    """What of ``torch.cuda`` is asked of a card: name -> what stands in for it."""
    name, capability, gigabytes = CARDS[card]
    properties = SimpleNamespace(
        name=name,
        major=capability[0],
        minor=capability[1],
        total_memory=gigabytes * 10**9,
        multi_processor_count=132,
        gcnArchName="",
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        uuid="0",
    )

    def is_bf16_supported(including_emulation=True):
        return including_emulation or capability >= (8, 0)

    silent = "set_device init _lazy_init manual_seed manual_seed_all set_rng_state"
    return {
        **_each(silent, _nothing),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: name,
        "get_device_capability": lambda *_: capability,
        "get_device_properties": lambda *_: properties,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "is_bf16_supported": is_bf16_supported,
        "mem_get_info": lambda *_: (properties.total_memory - watch.live, properties.total_memory),
        **_each("memory_allocated memory_reserved", lambda *_: watch.live),
        **_each("max_memory_allocated max_memory_reserved", lambda *_: watch.peak),
        "reset_peak_memory_stats": lambda *_: watch.reset_peak(),
        "memory_stats": lambda *_: {},
        "synchronize": lambda *_: watch.wait("synchronize"),
        "Stream": Stream,
        "Event": _event_of(watch),
        "current_stream": lambda *_: watch.stream,
        "default_stream": lambda *_: Stream(),
        "set_stream": lambda stream: setattr(watch, "stream", stream),
        "stream": lambda stream: StreamContext(watch, stream),
        "empty_cache": watch.empty_cache,
        "set_sync_debug_mode": lambda mode: setattr(watch, "mode", mode),
        "get_sync_debug_mode": lambda: watch.mode,
        "is_current_stream_capturing": lambda: watch.capturing is not None,
        "CUDAGraph": lambda: CUDAGraph(watch),
        "graph_pool_handle": lambda: (0, 1 + len(watch.pools)),
    }


def _tolist_of(watch):
    def tolist(tensor):
        """One copy and one wait, however many numbers."""
        watch.wait("tolist")
        with unset_fake_temporarily():
            made_up = watch._made_up(tensor.dtype)
            return torch.full(tensor.shape, made_up, dtype=tensor.dtype).tolist()

    return tolist


def _address_of(plain):
    def data_ptr(tensor):
        if not isinstance(tensor, FakeTensor):
            return plain(tensor)
        return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()

    return data_ptr


_PINNED = weakref.WeakSet()  # storages


def _pin(tensor, *_):
    _PINNED.add(tensor.untyped_storage())
    return tensor


def _is_pinned(tensor, *_):
    return tensor.untyped_storage() in _PINNED


def _traced(_, graph, inputs):
    """In place of Inductor, which has no code for this device: traced and differentiated."""
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


@contextlib.contextmanager
def fake_cuda(card="h200", *, world_size=1, rank=0, memory=None):
    """Within, "cuda" is that card, and ``world_size`` processes but this one are imagined.

    Those bring nothing to collectives, whose bytes are counted. The card is full at ``memory``
    bytes where that is given, as if another program had taken the rest since it was asked.
    """
    capability = CARDS[card][1]
    watch = Watch(capability)
    watch.memory = memory or CARDS[card][2] * 10**9
    for name, value in {"RANK": rank, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}.items():
        os.environ[name] = str(value)
    os.environ["WORLD_SIZE"] = str(world_size)
    with contextlib.ExitStack() as stack:

        def stand_in(owner, name, value):
            stack.enter_context(mock.patch.object(owner, name, value))

        for name, value in card_module(card, watch).items():
            stand_in(torch.cuda, name, value)
        stand_in(torch.cuda, "default_generators", (watch.generator,))
        stand_in(torch.cuda.graph, "default_capture_stream", None)
        for name, value in {
            "_host_emptyCache": _nothing,
            "_cuda_endAllocateToPool": watch.end_pool,
            "_cuda_releasePool": watch.release_pool,
        }.items():
            stack.enter_context(mock.patch.object(torch._C, name, value, create=True))
        for name in ("range_push", "range_pop"):
            stand_in(torch.cuda.nvtx, name, _nothing)
        stand_in(torch.nn.Module, "_apply", move_in_place)
        stand_in(
            torch.nn.functional, "scaled_dot_product_attention", attention_of(capability, watch)
        )
        stand_in(torch.nn.functional, "rms_norm", norms.on_cuda(torch.nn.functional.rms_norm))
        flash = capability >= (8, 0)
        stand_in(torch.backends.cuda, "is_flash_attention_available", lambda: flash)
        stand_in(torch._TorchCompileInductorWrapper, "__call__", _traced)
        stand_in(FakeTensor, "tolist", _tolist_of(watch))
        stand_in(torch.Tensor, "record_stream", _nothing)
        stand_in(torch.Tensor, "data_ptr", _address_of(torch.Tensor.data_ptr))
        stand_in(torch.Tensor, "data", _data_of(torch.Tensor.data))
        stand_in(torch.Tensor, "pin_memory", _pin)
        stand_in(torch.Tensor, "is_pinned", _is_pinned)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        stack.callback(lambda: dist.is_initialized() and dist.destroy_process_group())
        _stub_comparisons(stand_in)
        # It would touch the device, as torch.cuda.is_available().
        stand_in(FakeTensorMode, "avoid_device_init", True)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(watch)
        yield watch


def _stub_comparisons(stand_in):
    """DeepSpeed's ranks compare numbers, and norms with infinity, by values, which are made up."""
    import deepspeed

    deepspeed.init_distributed(verbose=False)
    modules = [m for n, m in list(sys.modules.items()) if n.startswith("deepspeed.runtime.zero")]
    same = ("assert_ints_same_as_other_ranks", "assert_lst_len_same_as_other_ranks")
    for module in modules:
        for name in (*same, "is_invalid_grad_norm"):
            if hasattr(module, name):
                stand_in(module, name, _nothing)
