"""A judge model's server on the loopback interface."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = str | int | Callable[[str], str | int]


class Judge:
    """A judge that gives the `answers` in order, and repeats the last one.

    An answer is a text, an HTTP status, or a function that makes one of these from the question. If
    the function raises an error, the connection is closed.
    """

    def __init__(self, *answers: Answer) -> None:
        self.answers, self.requests = list(answers), []
        self.retry_after = ""  # the header Retry-After of all answers
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler) -> None:  # noqa: N805
                size = int(handler.headers["Content-Length"])
                request = json.loads(handler.rfile.read(size))
                with lock:
                    key = handler.headers["Authorization"]
                    self.requests.append((handler.path, key, request))
                    answer = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
                if callable(answer):
                    answer = answer(request["messages"][0]["content"])
                status, text = (answer, "no") if isinstance(answer, int) else (200, answer)
                body = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
                handler.send_response(status)
                handler.send_header("Content-Length", str(len(body)))
                handler.send_header("Retry-After", self.retry_after)
                handler.end_headers()
                handler.wfile.write(body)

            def log_message(handler, *_: Any) -> None:  # noqa: N805
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = False  # `server_close` would wait for other threads
            request_queue_size = 128

            def handle_error(server, *_: Any) -> None:  # noqa: N805
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
