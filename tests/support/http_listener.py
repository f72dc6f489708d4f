"""A web server for tests: it hands over what is posted to it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


@contextmanager
def http_listener(take: Callable[[str, bytes], int]) -> Iterator[int]:
    """Run a server on 127.0.0.1, and yield its port. `take` gets path and body of each POST, and returns the status of the answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(take(self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()
