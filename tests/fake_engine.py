"""A stand-in for vLLM's server, standard library only: tokens at a fixed pace, pause and resume, weight versions, an event log.

    python fake_engine.py PORT [SECONDS_PER_TOKEN]
"""

import json
import random
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

changed = threading.Condition()
state = {"version": "default", "paused": False, "running": 0}
log: list[list] = []  # [what, ...] in order
pace = float(sys.argv[2]) if len(sys.argv) > 2 else 0.002


def sample(seed: int, most: int) -> dict:
    """One completion: its ids and length depend on the seed alone, its versions on when it runs."""
    rng, ids, spans = random.Random(seed), [], []
    for position in range(rng.randint(1, most)):
        with changed:
            changed.wait_for(lambda: not state["paused"], 60)
            log.append(["token", state["version"]])
            if not spans or spans[-1]["version"] != state["version"]:
                spans.append({"version": state["version"], "start": position, "end": position})
            spans[-1]["end"] = position + 1
        ids.append(rng.randint(3, 30))  # digits and letters of the tests' tokenizer
        time.sleep(pace * (20 if seed // 4 % 3 == 0 else 1))  # some groups are slow
    content = [{"logprob": -2.0} for _ in ids]
    return {"token_ids": ids, "finish_reason": "stop", "logprobs": {"content": content}, "weight_versions": spans}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer({"/weight_info": {"weight_version": state["version"]}, "/get_world_size": {"world_size": 1}, "/log": log}.get(self.path, {}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        route, _, query = self.path.partition("?")
        with changed:
            if route == "/pause":
                log.append(["pause", query])
                if "mode=wait" in query:
                    changed.wait_for(lambda: state["running"] == 0, 60)
                state["paused"] = True
            elif route == "/resume":
                state["paused"] = False
                log.append(["resume"])
                changed.notify_all()
            elif route == "/transfer":
                log.append(["transfer"])
            elif route == "/update_weight_version":
                state["version"] = body["new_version"]
                log.append(["version", body["new_version"]])
        if route != "/inference/v1/generate":
            return self.answer({})
        settings = body["sampling_params"]
        with changed:
            changed.wait_for(lambda: not state["paused"], 60)
            state["running"] += 1
            log.append(["request", state["version"], body.get("cache_salt"), settings["seed"]])
        choices = [None] * settings["n"]

        def fill(i):
            choices[i] = sample(settings["seed"] + i, settings["max_tokens"])

        threads = [threading.Thread(target=fill, args=(i,)) for i in range(len(choices))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with changed:
            state["running"] -= 1
            changed.notify_all()
        self.answer({"choices": choices})

    def answer(self, value):
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments):
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
