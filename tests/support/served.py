"""Serving engines on the loopback: one that forwards to a function, and answers in the formats of vLLM and SGLang."""

import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Respond = Callable[[str, dict | None], object]
"""The answer by path and body (of GET: None); an int is the status of a refusal, alone or with its content."""


@contextmanager
def served(respond: Respond) -> Iterator[str]:
    """Serve on a free port, and yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: dict | None) -> None:
            content = respond(self.path, body)
            if isinstance(content, int):
                content = content, {"error": {"message": f"refused: {self.path}"}}
            status, content = content if isinstance(content, tuple) else (200, content)
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with serving(Handler) as address:
        yield address


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Answer on a free port until the block ends, and yield the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.handle_error = lambda *_: None  # a client that was killed
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def vllm(path: str, body: dict | None) -> object:
    """Answers of vLLM 0.32.0, recorded from one, with ids drawn uniformly from those that are allowed."""
    if path == "/v1/models":
        return {"object": "list", "data": [{"id": "tar", "owned_by": "vllm", "root": "tar", "max_model_len": 1024}]}
    if path == "/version":
        return {"version": "0.32.0"}
    if path != "/v1/completions":
        return 404
    choices = []
    for index, prompt in enumerate(body["prompt"]):
        ids = random.Random(str(prompt)).choices(body["allowed_token_ids"], k=body["max_tokens"])
        logprobs = {"tokens": [f"token_id:{number}" for number in ids], "token_logprobs": [-1.5] * len(ids)}
        choices.append({"index": index, "text": "", "logprobs": logprobs, "finish_reason": "length", "token_ids": ids})
        choices[-1]["prompt_token_ids"] = prompt
    return {"choices": choices[::-1], "system_fingerprint": "vllm-0.32.0-2f289269", "usage": {"prompt_tokens": 9}}


def sglang(path: str, body: dict | None) -> object:
    """Answers of SGLang 0.5 as its source makes them."""
    if path == "/v1/models":
        return {"object": "list", "data": [{"id": "default", "owned_by": "sglang", "root": "default"}]}
    if path == "/server_info":
        return {"version": "0.5.23", "dtype": "bfloat16", "quantization": None, "internal_states": [{}]}
    if path == "/get_model_info":
        return {"model_path": "/models/tar", "tokenizer_path": "/models/tar", "weight_version": "default"}
    if path != "/generate":
        return 404
    rows, wanted = [], body["sampling_params"]
    words = 1 + max(map(int, wanted["logit_bias"]))
    for prompt in body["input_ids"]:
        allowed = [number for number in range(max(words, 286)) if str(number) not in wanted["logit_bias"]]
        ids = random.Random(str(prompt)).choices(allowed, k=wanted["max_new_tokens"])
        meta = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "finish_reason": {"type": "length"}}
        meta["output_token_logprobs"] = [[-1.5, number, None] for number in ids]
        rows.append({"text": "", "output_ids": ids, "meta_info": meta})
    return rows
