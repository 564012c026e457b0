"""Bodies of requests and results: JSON, and protobuf by the client's own message types."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeVar

import numpy as np
import torch
from tinker.proto import tinker_public_pb2 as messages
from torch import Tensor

from dschat_lora.addons.tinker.adapters import AdamParams, Datum
from dschat_lora.addons.tinker.bases import Adapting, Base
from dschat_lora.addons.tinker.losses import RATIO_MASK, READS, DatumLoss, make_loss
from dschat_lora.addons.tinker.samplers import MAX_TOP, SampleOptions, SampleRequest, SampleResult
from dschat_lora.addons.tinker.store import Facts
from dschat_lora.config.plurals import counted

JSON, PROTOBUF = "application/json", "application/x-protobuf"
MAX_SAMPLES = 1024
MAX_ENTRIES = 2**26  # of a tensor that comes sparse
NO_LOGPROB = -99999.0  # where a position has none
ValueT = TypeVar("ValueT")
_TYPES = {messages.DTYPE_FLOAT32: np.float32, messages.DTYPE_INT64: np.int64}


class JsonFields:
    """The fields of a JSON object, each of a type; what is unknown is refused at the end.

    Attributes:
        rest: those that were not taken.
    """

    def __init__(self, value: object, where: str = "") -> None:
        if not isinstance(value, dict):
            raise ValueError(f"{where or 'the body'} must be an object, got {value!r:.80}")
        self.rest: Facts = dict(value)
        self._where = where and f"{where}."

    def take(self, name: str, kind: type[ValueT], default: Any = ...) -> Any:
        """A field's value; null counts as absent."""
        value = self.rest.pop(name, None)
        if value is None:
            if default is ...:
                raise ValueError(f"{self._where}{name} is missing")
            return default
        fits = isinstance(value, (int, float) if kind is float else kind)
        if kind is not object and (not fits or isinstance(value, bool) is not (kind is bool)):
            names = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
            wanted = names.get(kind, "a whole number" if kind is int else "a number")
            raise ValueError(f"{self._where}{name} must be {wanted}, got {value!r:.80}")
        if isinstance(value, float) and not isfinite(value):
            raise ValueError(f"{self._where}{name} must be finite, got {value}")
        try:
            return float(value) if kind is float else value
        except OverflowError as error:
            raise ValueError(f"{self._where}{name} must be finite, got {value!r:.30}") from error

    def texts(self, name: str) -> dict[str, str] | None:
        """A field that is an object of texts, or absent."""
        texts: dict[str, str] | None = self.take(name, dict, None)
        if texts is not None and not all(isinstance(each, str) for each in texts.values()):
            raise ValueError(f"{self._where}{name} must have texts alone, got {texts!r:.80}")
        return texts

    def finish(self) -> None:
        """Refuse what was not taken."""
        if self.rest:
            raise ValueError(f"{self._where}{next(iter(self.rest))} is not known here")


@dataclass(frozen=True)
class ForwardBackward:
    """A request to compute a loss, and its gradient unless ``forward_only``."""

    examples: list[Datum]
    loss: DatumLoss
    forward_only: bool


def parse_message(body: bytes) -> messages.ForwardBackwardRequest:
    """The protobuf message of ``forward_backward``.

    Raises:
        ValueError: if it is none.
    """
    message = messages.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except Exception as error:  # of the protobuf library, by its version
        raise ValueError("the body is no protobuf message of forward_backward") from error
    return message


def forward_backward(body: bytes, base: Base) -> ForwardBackward:
    """A request of ``forward_backward``, checked against a base.

    Raises:
        ValueError: naming the example and its field.
    """
    message = parse_message(body)
    settings = {}
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") == "text":
            raise ValueError(f"loss_fn_config[{name!r}] must be a number, got {value.text!r:.80}")
        settings[name] = value.number
    if not settings:
        settings = dict(message.loss_fn_config)
    loss = make_loss(message.loss_fn, settings)
    if not message.data:
        raise ValueError("data is empty: there is nothing to learn from")
    examples = [
        _example(each, loss, base, f"data[{number}]") for number, each in enumerate(message.data)
    ]
    return ForwardBackward(examples, loss, bool(message.forward_only))


def _example(datum: Any, loss: DatumLoss, base: Base, where: str) -> Datum:
    tokens = _chunks(datum.model_input, base, f"{where}.model_input")
    inside = f"{where}.loss_fn_inputs"
    inputs = {
        name: _array(each, f"{inside}[{name!r}]") for name, each in datum.loss_fn_inputs.items()
    }
    if "target_tokens" not in inputs:
        raise ValueError(f"{inside} lacks 'target_tokens'; it has {sorted(inputs)}")
    targets = inputs.pop("target_tokens")
    if targets.ndim not in (1, 2) or len(targets) != len(tokens) or not targets.size:
        raise ValueError(
            f"{inside}['target_tokens'] must have {len(tokens)} entries, one for each token of "
            f"model_input, got the shape {list(targets.shape)}"
        )
    if targets.ndim == 2 and loss.name != "cross_entropy":
        raise ValueError(
            f"{inside}['target_tokens'] has {targets.shape[1]} tokens at each position, which "
            f"cross_entropy alone takes, not {loss.name}"
        )
    _check_tokens(targets, base, f"{inside}['target_tokens']")
    if loss.name == "cross_entropy":
        inputs.setdefault("weights", np.ones(targets.shape, np.float32))
    optional = (RATIO_MASK,) if loss.name == "gspo" and RATIO_MASK in inputs else ()
    reads = (*READS[loss.name], *optional)
    if unknown := sorted(inputs.keys() - {*reads}):
        raise ValueError(f"{inside} has {unknown[0]!r}, which {loss.name} does not read")
    numbers = {name: _numbers(inputs, name, targets.shape, inside, loss.name) for name in reads}
    return Datum(torch.from_numpy(tokens), torch.from_numpy(targets.astype(np.int64)), numbers)


def _chunks(chunks: Any, base: Base, where: str) -> Any:
    """(T,) int64 tokens of protobuf chunks."""
    parts = []
    for chunk in chunks:
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise ValueError(f"{where} has a chunk of {kind}; text alone is built here")
        content = chunk.encoded_text.tokens
        if len(content) % 4:
            raise ValueError(f"{where} has a chunk of {len(content)} bytes; a token has 4")
        parts.append(np.frombuffer(content, dtype=np.int32))
    tokens = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
    if not len(tokens):
        raise ValueError(f"{where} has no tokens")
    if len(tokens) > base.limit:
        raise ValueError(
            f"{where} has {counted(len(tokens), 'token')}, and {base.name} has {base.limit} "
            "positions"
        )
    _check_tokens(tokens, base, where)
    return tokens


def _numbers(
    inputs: Mapping[str, Any], name: str, shape: tuple[int, ...], inside: str, loss: str
) -> Tensor:
    if name not in inputs:
        raise ValueError(f"{inside} lacks {name!r}, which {loss} reads")
    values = inputs[name]
    if values.shape != shape:
        raise ValueError(
            f"{inside}[{name!r}] has the shape {list(values.shape)}, and target_tokens "
            f"{list(shape)}"
        )
    if not np.isfinite(values).all():
        raise ValueError(f"{inside}[{name!r}] holds NaN or infinity")
    return torch.from_numpy(values.astype(np.float32))


def _array(tensor: Any, where: str) -> Any:
    """The numbers of a protobuf tensor; a sparse one's other entries are 0."""
    kind = _TYPES.get(tensor.dtype)
    if kind is None:
        raise ValueError(f"{where} has a dtype that is not known here")
    shape = list(tensor.shape)
    try:
        if min(shape, default=0) < 0:
            raise ValueError("no dimension is negative")
        if not tensor.HasField("sparse_csr"):
            values = np.frombuffer(tensor.dense, dtype=kind)
            return values.reshape(shape or [-1]).copy()
        csr = tensor.sparse_csr
        values = np.frombuffer(csr.values, dtype=kind)
        rows = np.frombuffer(csr.crow_indices, dtype=np.int64)
        columns = np.frombuffer(csr.col_indices, dtype=np.int64)
        if len(shape) != 2 or shape[0] * shape[1] > MAX_ENTRIES:
            raise ValueError(f"a sparse one has 2 dimensions and at most {MAX_ENTRIES:,} entries")
        counts = np.diff(rows)
        if len(counts) != shape[0] or rows[0] != 0 or (counts < 0).any():
            raise ValueError("crow_indices do not count its rows")
        if not rows[-1] == len(values) == len(columns) or (columns < 0).any():
            raise ValueError("col_indices do not name a column of each value")
        dense = np.zeros(shape, dtype=kind)
        dense[np.repeat(np.arange(shape[0]), counts), columns] = values
        return dense
    except (ValueError, IndexError) as error:
        raise ValueError(f"{where} does not fill the shape {shape}: {error}") from error


def _check_tokens(tokens: Any, base: Base, where: str) -> None:
    wrong = (tokens < 0) | (tokens >= base.vocabulary_size)
    if wrong.any() or tokens.dtype.kind not in "iu":
        token = tokens[wrong].flat[0] if wrong.any() else tokens.flat[0]
        raise ValueError(
            f"{where} has the token {token}; those of {base.name} are whole numbers from 0 to "
            f"{base.vocabulary_size - 1}"
        )


def forward_backward_output(loss: float, logprobs: Sequence[Tensor]) -> bytes:
    """The result of ``forward_backward``."""
    result = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    result.metrics["loss:sum"] = loss
    # A record's examples have one shape behind their first dimension; all stay in order.
    shapes = {tuple(each.shape[1:]) for each in logprobs}
    groups = [list(logprobs)] if len(shapes) == 1 else [[each] for each in logprobs]
    for group in groups:
        record = result.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(group))
        field = record.fields["logprobs"]
        field.dtype = messages.DTYPE_FLOAT32
        field.trailing_shape.extend(group[0].shape[1:])
        field.data = b"".join(each.contiguous().numpy().tobytes() for each in group)
        ends = np.cumsum([0, *(4 * each.numel() for each in group)], dtype=np.int64)
        field.offsets = ends.tobytes()
    return result.SerializeToString()


def sample_request(body: Mapping[str, Any], base: Base, key: tuple[Any, ...]) -> SampleRequest:
    """The fields of ``asample`` that say what is asked; ``key`` seeds what has no seed.

    Raises:
        ValueError: naming the field.
    """
    fields = JsonFields(body)
    for name in ("sampling_session_id", "seq_id", "base_model", "model_path", "type"):
        fields.take(name, object, None)
    prompt = _model_input(fields.take("prompt", dict), base, "prompt")
    count = fields.take("num_samples", int, 1)
    if not 1 <= count <= MAX_SAMPLES:
        raise ValueError(f"num_samples must be from 1 to {MAX_SAMPLES}, got {count}")
    asks = ("prompt_logprobs", "topk_prompt_logprobs", "target_prompt_logprobs")
    # Of a prompt that fills the context there is nothing else to tell.
    room = base.limit - len(prompt) or int(any(body.get(name) for name in asks))
    options = _options(fields.take("sampling_params", dict), base, len(prompt), room, key)
    top_prompt, top_sample = (
        fields.take(name, int, 0) for name in ("topk_prompt_logprobs", "topk_sample_logprobs")
    )
    for name, value in (("prompt", top_prompt), ("sample", top_sample)):
        if not 0 <= value <= MAX_TOP:
            raise ValueError(f"topk_{name}_logprobs must be from 0 to {MAX_TOP}, got {value}")
    if fields.take("prompt_alt_tokens_k", int, 0):
        raise ValueError("prompt_alt_tokens_k is not built here")
    if fields.take("record_stability_info", bool, False):
        raise ValueError(
            "record_stability_info is for the loss stable_reinforce, whose formula is not "
            "published: take importance_sampling, cispo or gspo"
        )
    targets = fields.take("target_prompt_logprobs", dict, None)
    last = fields.take("prompt_logprobs_last_n", int, len(prompt) - 1)
    if not min(1, len(prompt) - 1) <= last < len(prompt):
        raise ValueError(f"prompt_logprobs_last_n must be from 1 to {len(prompt) - 1}, got {last}")
    request = SampleRequest(
        tuple(prompt),
        count,
        options,
        fields.take("prompt_logprobs", bool, False),
        top_prompt,
        top_sample,
        None if targets is None else _targets(targets, base, len(prompt)),
        last,
    )
    fields.finish()
    return request


def _options(
    body: Mapping[str, Any], base: Base, prompt_length: int, room: int, key: tuple[Any, ...]
) -> SampleOptions:
    fields = JsonFields(body, "sampling_params")
    if room < 1:
        raise ValueError(
            f"prompt has {counted(prompt_length, 'token')}, and {base.name} {base.limit} "
            "positions: there is no room for an answer"
        )
    most, seed = fields.take("max_tokens", int, room), fields.take("seed", int, None)
    if most > room:
        raise ValueError(
            f"sampling_params.max_tokens is {most}, and beside the prompt's {prompt_length} "
            f"tokens {base.name} has room for {room}"
        )
    stop = fields.take("stop", object, None)
    if isinstance(stop, str):
        stop = [stop]
    if stop is not None:
        texts = isinstance(stop, list) and all(isinstance(each, str) and each for each in stop)
        tokens = isinstance(stop, list) and all(type(each) is int for each in stop)
        if not texts and not tokens:
            raise ValueError(
                f"sampling_params.stop must be a text, a list of texts or one of tokens, got "
                f"{stop!r:.80}"
            )
        if tokens and stop:
            _check_tokens(np.array(stop), base, "sampling_params.stop")
        stop = tuple(stop)
    top_k = fields.take("top_k", int, -1)
    options = SampleOptions(
        most,
        temperature=fields.take("temperature", float, 1.0),
        top_p=fields.take("top_p", float, 1.0),
        top_k=max(0, top_k) if top_k >= -1 else top_k,
        stop=stop,
        seed=key if seed is None else (seed,),
    )
    fields.finish()
    return options


def _model_input(body: Mapping[str, Any], base: Base, where: str) -> list[int]:
    tokens: list[int] = []
    for number, chunk in enumerate(JsonFields(body, where).take("chunks", list)):
        fields = JsonFields(chunk, f"{where}.chunks[{number}]")
        if (kind := fields.take("type", str, "encoded_text")) != "encoded_text":
            raise ValueError(f"{where}.chunks[{number}] is {kind!r}; text alone is built here")
        numbers = fields.take("tokens", list)
        if not all(type(each) is int for each in numbers):
            raise ValueError(f"{where}.chunks[{number}].tokens must be a list of whole numbers")
        tokens += numbers
    if not tokens:
        raise ValueError(f"{where} has no tokens: an answer needs one to follow")
    _check_tokens(np.array(tokens), base, where)
    return tokens


def _targets(body: Mapping[str, Any], base: Base, length: int) -> Tensor:
    where = "target_prompt_logprobs"
    fields = JsonFields(body, where)
    if fields.take("sparse_crow_indices", list, None) is not None:
        raise ValueError(f"{where} must be dense; sparse ones are not built here")
    shape, data = fields.take("shape", list, None), fields.take("data", list)
    if not shape or len(shape) != 2 or shape[0] != length - 1 or len(data) != shape[0] * shape[1]:
        raise ValueError(f"{where} must have the shape [{length - 1}, K], got {shape!r:.80}")
    if not all(type(each) is int and -1 <= each < base.vocabulary_size for each in data):
        raise ValueError(f"{where} has what is neither -1 nor a token of {base.name}")
    return torch.tensor(data, dtype=torch.int64).view(length - 1, -1 if data else 0)


def sample_response(result: SampleResult) -> bytes:
    """The result of ``asample``."""
    response = messages.SampleResponse()
    for each in result.sequences:
        sequence = response.sequences.add(
            stop_reason=messages.STOP_REASON_STOP if each.stopped else messages.STOP_REASON_LENGTH,
            tokens=np.array(each.tokens, dtype=np.int32).tobytes(),
            logprobs=np.array(each.logprobs, dtype=np.float32).tobytes(),
        )
        if each.top is not None:
            _put_top(sequence.topk_sampled_logprobs, each.top, first=False)
    if result.prompt_logprobs is not None:
        values = np.concatenate([[np.nan], result.prompt_logprobs.numpy()]).astype(np.float32)
        response.prompt_logprobs = values.tobytes()
    if result.top_prompt is not None:
        _put_top(response.topk_prompt_logprobs, result.top_prompt, first=True)
    if result.targets is not None:
        tensor = response.target_prompt_logprobs
        tensor.dtype, tensor.dense = messages.DTYPE_FLOAT32, result.targets.numpy().tobytes()
        tensor.shape.extend(result.targets.shape)
    return response.SerializeToString()


def _put_top(place: Any, top: tuple[Tensor, Tensor], *, first: bool) -> None:
    """(T, k) tokens and log-probabilities; with ``first`` a row before them, which has none."""
    tokens, logprobs = (each.numpy() for each in top)
    if first:
        tokens, logprobs = (np.pad(each, ((1, 0), (0, 0))) for each in (tokens, logprobs))
        logprobs[0] = NO_LOGPROB
    # Positions that are left out.
    tokens = np.where(np.isnan(logprobs), 0, tokens)
    logprobs = np.where(np.isnan(logprobs), NO_LOGPROB, logprobs)
    place.token_ids = tokens.astype(np.int32).tobytes()
    place.logprobs = logprobs.astype(np.float32).tobytes()
    place.length, place.k = tokens.shape


def adapting(body: Mapping[str, Any] | None) -> Adapting:
    """The ``lora_config`` of a new model.

    Raises:
        ValueError: naming the field.
    """
    if body is None:
        raise ValueError("lora_config is missing: adapters alone are trained here")
    fields = JsonFields(body, "lora_config")
    trains = {name: fields.take(f"train_{name}", bool, True) for name in ("attn", "mlp", "unembed")}
    how = Adapting(fields.take("rank", int), fields.take("seed", int, 0), *trains.values())
    fields.finish()
    return how


def content_of(body: bytes) -> JsonFields:
    """The fields of a JSON body but those that say of what and which request it is."""
    fields = JsonFields(json.loads(body))
    for name in ("type", "model_id", "seq_id", "session_id", "model_seq_id"):
        fields.rest.pop(name, None)
    return fields


def adam_params(fields: JsonFields) -> AdamParams:
    """The parameters of an ``optim_step``.

    Raises:
        ValueError: naming the field.
    """
    if fields.take("optimizer_params", dict, None) is not None:
        raise ValueError("optimizer_params: AdamW alone is built here; send adam_params")
    given = fields.take("adam_params", dict)
    if (lost := next((name for name, value in given.items() if value is None), None)) is not None:
        # As which clients write NaN and infinity.
        raise ValueError(f"adam_params.{lost} must be finite, got null")
    inner = JsonFields(given, "adam_params")
    defaults = vars(AdamParams())
    params = AdamParams(
        **{name: inner.take(name, float, default) for name, default in defaults.items()}
    )
    inner.finish()
    return params
