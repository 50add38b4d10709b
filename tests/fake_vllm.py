"""A fake vLLM server for the control routes: it remembers every call, has versions, a prefix cache and sleep states, and can be told to misbehave."""

import itertools
import json
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

clock = itertools.count()  # one order of events over all servers


class FakeVLLM:
    """Use as a context manager. answers: route -> (status, body); delays: route -> seconds; jitter: longest random delay, in seconds."""

    def __init__(self, world_size=1, asleep=False, jitter=0.0):
        self.world_size, self.jitter = world_size, jitter
        self.calls = []  # (number of arrival, number of answer, route, query, body)
        self.answers, self.delays = {}, {}
        self.version, self.paused, self.updating = "default", False, False
        self.awake = set() if asleep else {"weights", "kv_cache"}
        self.weights = {}  # name -> version under which it came; emptied by deep sleep
        self.incoming, self.illegal = {}, []
        self.cache = {}  # prompt -> version of the keys
        self.unknown_tags = set()  # of wake_up, ignored as vLLM ignores them

    def __enter__(self):
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self):
                arrived = next(clock)
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                parts = urlsplit(self.path)
                route, query = parts.path.strip("/"), parse_qs(parts.query)
                time.sleep(fake.delays.get(route, random.random() * fake.jitter))
                status, answer = fake.answers[route] if route in fake.answers else fake.handle(route, query, body)
                text = json.dumps(answer).encode()
                fake.calls.append((arrived, next(clock), route, query, body))
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = answer

            def log_message(self, *a):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *a: None  # a caller that gave up is no news
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exc):
        self.server.shutdown()
        self.server.server_close()

    def routes(self):
        return [route for _, _, route, _, _ in self.calls]

    def generate(self, prompt):
        """The version of the keys that a prompt is continued from."""
        if self.awake != {"weights", "kv_cache"} or self.paused or not self.weights:
            self.illegal.append("generate")
        return self.cache.setdefault(prompt, self.version)

    def handle(self, route, query, body):
        if route == "get_world_size":
            return 200, {"world_size": self.world_size}
        if route == "pause":
            self.paused = True
            if query["clear_cache"] == ["true"]:
                self.cache.clear()
        elif route == "resume":
            self.paused = False
        elif route == "start_weight_update":
            if "weights" not in self.awake:
                self.illegal.append("weights sent to a sleeping engine")
                return 500, {"error": "asleep"}
            self.updating, self.incoming = True, {}
        elif route == "update_weights":
            self.incoming |= dict.fromkeys(body["update_info"]["names"])
        elif route == "finish_weight_update":
            self.updating, self.weights = False, self.incoming
        elif route == "update_weight_version":
            self.version = body["new_version"]
        elif route == "weight_info":
            return 200, {"weight_version": self.version}
        elif route == "sleep":
            if not self.awake:
                self.illegal.append("slept twice")
            self.awake = set()
            self.cache.clear()
            if query["level"] == ["2"]:
                self.weights = {}
            return 200, {"status": "sleeping"}
        elif route == "wake_up":
            (tag,) = query["tags"]
            if tag == "kv_cache" and not self.weights:
                self.illegal.append("cache woken before the weights came")
            self.awake |= {tag} - self.unknown_tags
            return 200, {"status": "awake" if self.awake == {"weights", "kv_cache"} else "sleeping"}
        return 200, {}
