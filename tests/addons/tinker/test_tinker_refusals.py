"""What the server refuses: what is said, and that nobody's numbers change by it."""

import json
import math

import pytest

for each in ("tinker", "uvicorn"):
    pytest.importorskip(each, reason="the extra [tinker] is not installed")

import numpy as np
from tinker.proto import tinker_public_pb2 as messages

from addons.tinker.served import TOKENS, call, new_trainer

NAN, INF, COUNT = math.nan, math.inf, len(TOKENS)
NOT_ONE = dict.fromkeys(("train_mlp", "train_attn", "train_unembed"), False)
PROMPT_TOP = {"dtype": "int64", "shape": [2, 1], "data": [1, 2]}
ADVANTAGES, TARGETS = "loss_fn_inputs['advantages']", "data[0].loss_fn_inputs['target_tokens']"
FITS, CSR = "does not fill the shape", "crow_indices do not count"

# By method, path and status of the answer: what it says, and how a request is otherwise than one
# that is right. Of those that are accepted (200), what their results say.
REFUSED = {
    ("GET training_runs?limit=-1", 400): [("limit and offset", None)],
    ("GET training_runs/x", 404): [("no model 'x'", None)],
    ("GET sessions/x", 404): [("no session 'x'", None)],
    ("GET samplers/x", 404): [("no sampler 'x'", None)],
    ("DELETE training_runs/{run}/checkpoints/weights/none", 404): [("has no weights/none", None)],
    ("DELETE training_runs/{run}/checkpoints/x/none", 404): [("there are no 'x', but weig", None)],
    ("POST copy_weights", 404): [("copy_weights is not built here", {})],
    ("POST weights_info", 404): [
        ("tinker_path: there is no model 'x'", {"tinker_path": "tinker://x/weights/y"})
    ],
    ("POST session_heartbeat", 400): [("session_id must be a text", {"session_id": []})],
    ("POST retrieve_future", 410): [("nothing is known of", {"request_id": "x"})],
    ("POST create_session", 400): [
        ("the body is not JSON", b"[" * 10**5),
        ("sdk_version is '0.39.0', and this server speaks the protocol of tinker 0.38", {}),
        ("user_metadata must have texts alone", {"sdk_version": None, "user_metadata": {"a": 1}}),
    ],
    ("POST create_model", 404): [("no session 'x'", {"session_id": "x"})],
    ("POST create_model", 400): [
        ("base_model must be one of base, twin", {"base_model": "other"}),
        ("user_metadata must have texts alone", {"user_metadata": {"a": 1}}),
        ("model_seq_id must be", {"model_seq_id": -1}),
        ("optimizer_config must be adamw", {"optimizer_config": {"type": "dimuon"}}),
        ("lora_config is missing: adapters alone", {"lora_config": None}),
        ("lora_config.rank must be from 1 to 128", {"lora_config": {"rank": 0}}),
        ("lora_config.rank must be from 1 to 128, the", {"lora_config": {"rank": 129}}),
        ("lora_config.alpha is not known", {"lora_config": {"rank": 2, "alpha": 3}}),
        ("train_mlp, train_attn and train_un", {"lora_config": {"rank": 2, **NOT_ONE}}),
    ],
    ("POST load_weights", 404): [("path: there is no model 'x'", {"path": "tinker://x/weights/y"})],
    ("POST load_weights", 400): [
        ("path: there are no weights", {"path": "{state}-2"}),
        ("base_model is 'twin', and the weights are of base", {"base_model": "twin"}),
    ],
    ("POST create_sampling_session", 400): [
        ("a sampler needs base_model or model_path", {}),
        ("base_model must be one of", {"base_model": "other"}),
        ("model_path: there are no weights", {"model_path": "{state}-2"}),
    ],
    ("POST asample", 400): [
        ("seq_id must be", {"seq_id": None}),
        ("prompt has the token 1024", {"prompt": [1024]}),
        ("prompt has the token 1000", {"prompt": [10**30]}),
        ("prompt has no tokens", {"prompt": []}),
        ("prompt has 512 tokens", {"prompt": [9] * 512}),
        ("sampling_params.max_tokens is 510", {"sampling_params": {"max_tokens": 510}}),
        ("sampling_params.max_tokens must be 1", {"sampling_params": {"max_tokens": 0}}),
        ("sampling_params.temperature must be", {"sampling_params": {"temperature": -1.0}}),
        ("sampling_params.temperature must be fin", {"sampling_params": {"temperature": 10**400}}),
        ("sampling_params.top_p must be", {"sampling_params": {"top_p": 0.0}}),
        ("sampling_params.top_k must be", {"sampling_params": {"top_k": -2}}),
        ("sampling_params.stop must be", {"sampling_params": {"stop": [""]}}),
        ("sampling_params.stop has the token 5000", {"sampling_params": {"stop": [5000]}}),
        ("num_samples must be from 1", {"num_samples": 0}),
        ("topk_sample_logprobs must be from 0", {"topk_sample_logprobs": 999}),
        ("must have the shape [2, K]", {"target_prompt_logprobs": {**PROMPT_TOP, "data": [1]}}),
        ("logprobs has", {"target_prompt_logprobs": {**PROMPT_TOP, "data": ["a", "b"]}}),
    ],
    ("POST optim_step", 404): [("no model 'x'", {"model_id": "x"})],
    ("POST optim_step", 400): [
        ("seq_id is missing", {"seq_id": None}),
        ("seq_id must be at most", {"seq_id": 10**400}),
        ("seq_id must be a whole number", {"seq_id": "5"}),
        ("the body is not JSON", b"{"),
        ("the body must be an object", []),
    ],
    ("POST optim_step", 200): [
        ("adam_params.learning_rate must be in [0", {"adam_params": {"learning_rate": -1.0}}),
        ("adam_params.learning_rate must be finite", {"adam_params": {"learning_rate": None}}),
        ("adam_params.learning_rate must be in", {"adam_params": {"learning_rate": 1e300}}),
        ("adam_params.beta1 must be in [0, 1)", {"adam_params": {"beta1": 1.0}}),
        ("adam_params.grad_clip_norm must be in", {"adam_params": {"grad_clip_norm": -1.0}}),
        ("optimizer_params: AdamW alone", {"optimizer_params": {"type": "dimuon"}}),
    ],
    ("POST save_weights", 200): [
        ("path must be a name of letters", {"path": "../../x"}),
        ("path must be a name of letters, digits, '.', '_' and '-', got '..'", {"path": ".."}),
        ("got 'xxx", {"path": "x" * 300}),
        ("ttl_seconds must be from 1", {"path": "x", "ttl_seconds": 0}),
        ("ttl_seconds must be from 1 to 2147483647", {"path": "x", "ttl_seconds": 10**20}),
    ],
    ("POST save_weights_for_sampler", 200): [
        ("got '.unnamed-x'", {"path": ".unnamed-x"}),
        ("needs path or sampling_session_seq_id", {}),
    ],
    ("POST save_weights_external", 200): [
        ("age_encryption_recipients is not built", {"age_encryption_recipients": ["age1"]})
    ],
    ("POST load_weights", 200): [
        ("path: there are no weights", {"path": "tinker://{run}/weights/.."}),
        ("path must be like tinker://RUN/weights/NAME", {"path": "/etc/passwd"}),
        ("another rank", {"path": "{wide}"}),
        ("path: the weights are of twin, and the model is of base", {"path": "{twin}"}),
    ],
    ("POST forward_backward", 400): [
        ("no protobuf message", b"\xff" * 9),
        ("seq_id must be", {"seq_id": 0}),
    ],
    ("POST forward_backward", 200): [
        ("data is empty", {"count": 0}),
        ("data[0].model_input has the token 1024", {"tokens": [1, 1024]}),
        ("data[0].model_input has the token -1", {"tokens": [1, -1]}),
        ("data[0].model_input has a chunk of image", {"image": {"data": b"x"}}),
        ("data[0].model_input has no tokens", {"tokens": [], "target_tokens": []}),
        ("model_input has 513 tokens, and base has 512 positions", {"tokens": [9] * 513}),
        ("model_input has a chunk of 3 bytes", {"tokens": b"\1\0\0"}),
        (f"{TARGETS} has the token", {"target_tokens": [2000] * COUNT}),
        (f"{TARGETS} must have 7 entries", {"target_tokens": [1, 2]}),
        ("loss_fn_inputs lacks 'target_tokens'", {"target_tokens": None}),
        ("whole numbers", {"target_tokens": [1.5] * COUNT}),
        (f"target_tokens'] {FITS}", {"target_tokens": {"dense": b"\1\0\0", "shape": [2]}}),
        (FITS, {"target_tokens": {"shape": [2, 2**62]}}),
        (FITS, {"target_tokens": {"shape": [-3]}}),
        ("dtype that is not known", {"target_tokens": {"shape": [2], "dtype": 4}}),
        ("a sparse one has 2 dimensions", {"target_tokens": ([2], [1], [0, 1], [0])}),
        ("at most 67,108,864", {"target_tokens": ([2, 2**60], [1], [0, 1, 1], [0])}),
        (CSR, {"target_tokens": ([2, 2], [1], [0, 5], [0])}),
        (CSR, {"target_tokens": ([2, 2], [1], [0, 2, 1], [0])}),
        ("col_indices do not name", {"target_tokens": ([2, 2], [1], [0, 2**60, 2**60], [0])}),
        ("col_indices do not name", {"target_tokens": ([2, 2], [1], [0, 1, 1], [-1])}),
        (FITS, {"target_tokens": ([2, 2], [1], [0, 1, 1], [2])}),
        ("loss_fn_inputs['weights'] holds NaN or infinity", {"weights": [INF] * COUNT}),
        ("loss_fn_inputs['weights'] has the shape", {"weights": [1.0]}),
        (f"{ADVANTAGES} has the shape [1], and targ", {"loss_fn": "ppo", "advantages": [1.0]}),
        ("lacks 'advantages', which ppo reads", {"loss_fn": "ppo", "advantages": None}),
        ("['logprobs'] has the shape", {"loss_fn": "cispo", "logprobs": [[-1.0] * COUNT]}),
        (f"{ADVANTAGES} holds NaN", {"loss_fn": "ppo", "advantages": [NAN] * COUNT}),
        ("has 'mask', which ppo does not read", {"loss_fn": "ppo", "mask": [1.0] * COUNT}),
        ("which cross_entropy alone", {"loss_fn": "ppo", "target_tokens": [[1, 2]] * COUNT}),
        ("loss_fn stable_reinforce", {"loss_fn": "stable_reinforce"}),
        ("loss_fn must be one of cross_entropy", {"loss_fn": "none"}),
        ("clip_high_threshold, got 'clip'", {"loss_fn": "ppo", "config": {"clip": 0.2}}),
        ("['beta'] must be a number >= 0", {"loss_fn": "dro", "config": {"beta": -1.0}}),
        ("['beta'] must be a number", {"loss_fn": "dro", "config": {"beta": NAN}}),
        ("a number, got 'much'", {"loss_fn": "dro", "config": {"beta": "much"}}),
    ],
}


def put(tensor, value):
    """A list of numbers; a dict of fields as they are; or shape, values, rows and columns."""
    tensor.dtype = messages.DTYPE_INT64
    if isinstance(value, tuple):
        shape, *parts = value
        for name, part in zip(("values", "crow_indices", "col_indices"), parts, strict=True):
            setattr(tensor.sparse_csr, name, np.array(part, np.int64).tobytes())
    elif isinstance(value, dict):
        shape = value["shape"]
        tensor.dense = value.get("dense", np.array([1, 2]).tobytes())
        tensor.dtype = value.get("dtype", tensor.dtype)
    else:
        is_whole = np.array(value).dtype.kind != "f" or not value
        array = np.array(value, np.int64 if is_whole else np.float32)
        tensor.dense, shape = array.tobytes(), array.shape
        tensor.dtype = messages.DTYPE_INT64 if is_whole else messages.DTYPE_FLOAT32
    tensor.shape.extend(shape)


def message(run, seq, changes=()):
    """The bytes of forward_backward, whose last example has the changes."""
    changes = dict(changes)
    loss, tokens = changes.pop("loss_fn", "cross_entropy"), changes.pop("tokens", TOKENS)
    request = messages.ForwardBackwardRequest(
        model_id=run, seq_id=changes.pop("seq_id", seq), loss_fn=loss
    )
    for name, value in changes.pop("config", {}).items():
        field = "text" if isinstance(value, str) else "number"
        setattr(request.loss_fn_config_v2[name], field, value)
    for _ in range(changes.pop("count", 1)):
        one = request.data.add()
        if picture := changes.pop("image", None):
            one.model_input.add().image.data = picture["data"]
        elif tokens:
            content = tokens if isinstance(tokens, bytes) else np.array(tokens, np.int32).tobytes()
            one.model_input.add().encoded_text.tokens = content
        policy = {"logprobs": [-4.0] * COUNT, "advantages": [1.0] * COUNT}
        inputs = {"target_tokens": [5] * len(tokens), **(policy if loss != "cross_entropy" else {})}
        for name, value in (inputs | changes).items():
            if value is not None:
                put(one.loss_fn_inputs[name], value)
    return request.SerializeToString()


class Trainer:
    """Sends the requests of a run as they are."""

    def __init__(self, address, client, places):
        self.address, self.places = address, places
        self.session, self.run = client.holder.get_session_id(), new_trainer(client).model_id
        self.seq = 1
        self.sampler = client.create_sampling_client(base_model="base").result()

    def body(self, path, status, changes):
        """A request that is right, but for the changes."""
        if not isinstance(changes, dict):
            return changes
        changes = {
            name: value.format(**self.places, run=self.run) if isinstance(value, str) else value
            for name, value in changes.items()
        }
        if path == "forward_backward":
            return message(self.run, self.seq, changes)
        if "prompt" in changes:
            changes["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": changes["prompt"]}]}
        session, run = {"session_id": self.session}, {"model_id": self.run, "seq_id": self.seq}
        right = {
            "create_session": {"sdk_version": "0.39.0"},
            "create_model": {**session, "model_seq_id": 99, "base_model": "base"}
            | {"lora_config": {"rank": 2}},
            "load_weights": run | {"optimizer": False}
            if status == 200
            else {**session, "model_seq_id": 99, "path": self.places["state"], "optimizer": False},
            "create_sampling_session": {**session, "sampling_session_seq_id": 99},
            "asample": {"sampling_session_id": self.sampler._sampling_session_id, "seq_id": 99}
            | {"prompt": {"chunks": [{"tokens": [1, 2, 3]}]}, "sampling_params": {"max_tokens": 2}},
            "optim_step": run,
        }
        own = right.get(path, run if path.startswith("save_weights") else {})
        return own | changes

    def told(self, path, status, changes):
        """(status, JSON) of a request, or of its result where it was accepted."""
        method, path = path.format(run=self.run).split()
        kind = "application/x-protobuf" if path == "forward_backward" else "application/json"
        answer = call(self.address, method, path, self.body(path, status, changes), kind)
        if answer[0] == 200:
            self.seq += 1
            answer = call(self.address, "POST", "retrieve_future", json.loads(answer[1]))
        return answer

    def step(self, between=lambda: None):
        """What a step's requests give; something may come between them."""
        numbers = self.told("POST forward_backward", 200, {"weights": [1.0] * COUNT})
        between()
        params = {"adam_params": {"learning_rate": 1e-2}}
        return numbers, self.told("POST optim_step", 200, params)


def test_a_mistake_is_told_by_its_field_and_changes_no_number(client, address):
    saved = {"state": {}, "wide": {"rank": 8}, "twin": {"base_model": "twin"}}
    places = {
        name: new_trainer(client, **options).save_state(name).result().path
        for name, options in saved.items()
    }
    calm, neighbour, tenant = (Trainer(address, client, places) for _ in range(3))
    wrong = []

    def err():
        for (path, status), rows in REFUSED.items():
            for words, changes in rows:
                outcome, text = tenant.told(path, status, changes)
                told = json.loads(text) if text[:1] == b"{" else {}
                is_right = outcome == status and words in (told.get("detail") or told.get("error"))
                if not is_right or (status == 200 and told["category"] != "user"):
                    wrong.append((path, words, outcome, text))

    expected = [calm.step() for _ in range(2)]
    assert [tenant.step(err), tenant.step()] == expected
    assert [neighbour.step() for _ in range(2)] == expected
    assert not wrong


@pytest.mark.smoke
def test_a_number_that_is_lost_holds_nothing_up_for_good(client, address):
    run = new_trainer(client).model_id
    for seq, status in ((3, 200), (2, 410)):
        kind = "application/x-protobuf"
        accepted = call(address, "POST", "forward_backward", message(run, seq), kind)[1]
        assert call(address, "POST", "retrieve_future", json.loads(accepted))[0] == status
