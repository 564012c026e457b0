"""Servers that speak vLLM's interface and SGLang's own, with faults that tests choose."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

END, LIMIT = 2, 4


def answer_to(body):
    """What every server that is well answers: tokens that tell the prompt."""
    tokens = [body["prompt"][0] + 10, END]
    return {
        "model": body["model"],
        "choices": [
            {
                "token_ids": tokens,
                "finish_reason": "stop",
                "logprobs": {"token_logprobs": [-0.5, -0.25]},
            }
        ],
    }


class Fake:
    """A server; ``fault`` gets a handler and a request, and says whether it has dealt with it."""

    def __init__(self, fault=lambda handler, body, number: False, adapters=True):
        self.loaded, self.asked, self.lock = [], 0, threading.Lock()
        self.keys = set()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def reply(self, content, status=200):
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                self.reply({"data": [{"id": "base", "max_model_len": 64}, {"id": "other"}]})

            def do_POST(self):
                fake.keys.add(self.headers["Authorization"])
                size = int(self.headers["Content-Length"])
                body = json.loads(self.rfile.read(size))
                if self.path == "/v1/load_lora_adapter":
                    if not adapters:
                        return self.reply({"detail": "Not Found"}, 404)
                    if body["lora_name"] in fake.loaded:
                        return self.reply({"message": "has already been loaded"}, 400)
                    fake.loaded.append(body["lora_name"])
                    return self.reply(b"Success")
                if self.path == "/v1/unload_lora_adapter":
                    fake.loaded.remove(body["lora_name"])
                    return self.reply(b"Success")
                with fake.lock:
                    fake.asked += 1
                    number = fake.asked
                if not fault(self, body, number):
                    self.reply(answer_to(body))

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_port}"

    @contextmanager
    def running(self):
        thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self.server.shutdown()
            self.server.server_close()
            thread.join()


class FakeSGLang(Fake):
    """A server that speaks as SGLang's documentation has it, and knows nothing of vLLM's paths."""

    def __init__(self, fault=lambda handler, body, number: False):
        super().__init__(fault)
        fake, handler = self, self.server.RequestHandlerClass
        self.bodies = []

        def do_get(self):
            cards = [{"id": "base", "owned_by": "sglang", "max_model_len": 64}]
            self.reply({"object": "list", "data": cards} if self.path == "/v1/models" else {})

        def do_post(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path in ("/load_lora_adapter", "/unload_lora_adapter"):
                unloads, name = "unload" in self.path, body["lora_name"]
                with fake.lock:
                    if (name in fake.loaded) != unloads:
                        words = f"LoRA adapter {name} already exists, or does not"
                        return self.reply({"success": False, "error_message": words}, 400)
                    (fake.loaded.remove if unloads else fake.loaded.append)(name)
                return self.reply({"success": True, "loaded_adapters": fake.loaded})
            if self.path != "/generate":
                return self.reply({"detail": "Not Found"}, 404)
            with fake.lock:
                fake.asked += 1
                number = fake.asked
                fake.bodies.append(body)
            if fault(self, body, number):
                return None
            if body["lora_path"] not in fake.loaded:
                words = f"Got LoRA adapter that has never been loaded: {body['lora_path']}"
                return self.reply({"error": {"message": words}}, 400)
            drawn = [[-0.5, body["input_ids"][0] + 10, None], [-0.25, END, None]]
            meta = {
                "finish_reason": {"type": "stop", "matched": END},
                "output_token_logprobs": drawn,
            }
            return self.reply(
                {"text": "", "output_ids": [n for _, n, _ in drawn], "meta_info": meta}
            )

        handler.do_GET, handler.do_POST = do_get, do_post
