"""What the gateway costs, and what asking many collections at once costs.

    python benches/gateway/bench.py [--binary target/release/ragstone] [--rounds 400] [--documents 20000] [--delay 20]

Needs nothing but Python and a build of the server. Three servers run on this machine, on their own data
folders; the others are services of the first. Calls that are compared take turns, so that a busy machine
disturbs both alike. Services that share the processors with each other and with the gateway slow each
other down, which services do not that run elsewhere; so eight collections are asked for twice: of the
gateway's own store and one service, and of two services whose answers arrive after a delay, as over a
network. Prints a table; ends with exit code 1 when a target is missed.
"""

import argparse
import http.client
import json
import pathlib
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = ROOT / "crates/models/tests/fixtures/bert"
WORDS = "filter vector index query token model store graph cache shard node edge page block queue".split()

OVERHEAD_MS = 1.0
SPREAD = 1.3


class Server:
    """A running server and one connection to it."""

    def __init__(self, binary, folder, config=""):
        folder.mkdir()
        (folder / "embeddings.yml").write_text(f"embeddings:\n  - {{id: tiny, path: {MODEL}}}\n")
        (folder / "ragstone.yml").write_text(config)
        command = [binary, "serve", "--port", "0", "--data-dir", folder / "data"]
        command += ["--embeddings-config", folder / "embeddings.yml", "--config", folder / "ragstone.yml"]
        self.log = open(folder / "log", "w+")
        self.process = subprocess.Popen(command, stderr=self.log, stdout=subprocess.DEVNULL)
        self.address = self._wait_for_address(folder / "log")
        self.http = http.client.HTTPConnection(self.address)

    def _wait_for_address(self, log):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.poll() is None:
            found = re.search(r"listening on http://(\S+)", log.read_text())
            if found:
                return found.group(1)
            time.sleep(0.02)
        sys.exit(f"the server does not start:\n{log.read_text()}")

    def post(self, path, body):
        self.http.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = self.http.getresponse()
        content = answer.read()
        if answer.status != 200:
            sys.exit(f"{path}: {answer.status} {content[:300]!r}")
        return json.loads(content)

    def stop(self):
        self.process.terminate()
        self.process.wait()
        self.log.close()


class Distance:
    """A way to a server that its answers take some time on."""

    def __init__(self, address, milliseconds):
        host, port = address.split(":")
        self.target, self.seconds = (host, int(port)), milliseconds / 1e3
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1:%d" % self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            near, _ = self.listener.accept()
            far = socket.create_connection(self.target)
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            asked = threading.Event()
            threading.Thread(target=self._requests, args=(near, far, asked), daemon=True).start()
            threading.Thread(target=self._answers, args=(far, near, asked), daemon=True).start()

    def _requests(self, near, far, asked):
        while content := near.recv(1 << 16):
            asked.set()
            far.sendall(content)
        far.shutdown(socket.SHUT_WR)

    def _answers(self, far, near, asked):
        while content := far.recv(1 << 16):
            if asked.is_set():
                asked.clear()
                time.sleep(self.seconds)
            near.sendall(content)
        near.close()


def fill(server, name, documents, seed):
    chance = random.Random(seed)
    server.post("/collections", {"name": name, "embedding_model": "tiny"})
    for start in range(0, documents, 1000):
        batch = [
            {"id": str(n), "text": " ".join(chance.choices(WORDS, k=6)), "embedding": [chance.gauss(0, 1) for _ in range(32)]}
            for n in range(start, min(start + 1000, documents))
        ]
        server.post(f"/collections/{name}/documents", {"documents": batch})


def timed(call):
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def alternate(calls, rounds):
    """Milliseconds of each call, taking turns."""
    times = {name: [] for name in calls}
    for turn in range(rounds + 20):
        for name, call in calls.items():
            took = timed(call)
            if turn >= 20:
                times[name].append(took)
    return {name: statistics.median(taken) for name, taken in times.items()}


def overhead(near, far, rounds):
    query = {"query_embedding": [0.1 * (n % 7) - 0.2 for n in range(32)], "top_k": 10}
    p50 = alternate(
        {
            "direct": lambda: far.post("/collections/f0/query", query),
            "gateway": lambda: near.post("/api/collections/f0/query", {**query, "service": "far"}),
        },
        rounds,
    )
    return p50["direct"], p50["gateway"]


def spread(near, services, rounds):
    """One collection at a time, the four of one service, and all eight at once."""
    targets = [{"service": service, "name": f"{letter}{n}"} for service, letter in services for n in range(4)]

    def collect(collections):
        answer = near.post("/api/rag/collect", {"user_message": "graph of the index", "collections": collections, "top_k": 10})
        assert not answer["warnings"] and len(answer["results"]) == 10, answer

    calls = {f"{t['service']}/{t['name']}": (lambda t=t: collect([t])) for t in targets}
    calls["four of one"] = lambda: collect(targets[:4])
    calls["four of the other"] = lambda: collect(targets[4:])
    calls["all eight"] = lambda: collect(targets)
    p50 = alternate(calls, rounds // 2)
    together = p50.pop("all eight")
    service = max(p50.pop("four of one"), p50.pop("four of the other"))
    return max(p50.values()), service, together


def report_spread(title, slowest, service, together):
    print(f"{title}:")
    print(f"  collect, slowest of 8 collections {slowest:8.2f} ms")
    print(f"  collect, slowest of 2 services    {service:8.2f} ms   with its 4 collections")
    print(f"  collect, all 8 at once            {together:8.2f} ms   {together / slowest:.2f} x the slowest collection, "
          f"{together / service:.2f} x the slowest service (at most {SPREAD})")


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--binary", default=ROOT / "target/release/ragstone")
    arguments.add_argument("--rounds", type=int, default=400)
    arguments.add_argument("--documents", type=int, default=20000)
    arguments.add_argument("--delay", type=float, default=20, help="milliseconds")
    arguments = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        far = Server(arguments.binary, folder / "far")
        farther = Server(arguments.binary, folder / "farther")
        away = [Distance(server.address, arguments.delay) for server in (far, farther)]
        urls = {"far": far.address, "far-away": away[0].address, "farther-away": away[1].address}
        services = "".join(
            f"  {name}: {{provider: chromadb-wrapper, url: 'http://{address}'}}\n" for name, address in urls.items()
        )
        near = Server(arguments.binary, folder / "near", f"services:\n{services}")
        try:
            for n in range(4):
                fill(near, f"l{n}", arguments.documents, n)
                fill(far, f"f{n}", arguments.documents, 10 + n)
                fill(farther, f"g{n}", arguments.documents, 20 + n)
            direct, gateway = overhead(near, far, arguments.rounds)
            here = spread(near, [("local", "l"), ("far", "f")], arguments.rounds)
            elsewhere = spread(near, [("far-away", "f"), ("farther-away", "g")], arguments.rounds // 2)
        finally:
            for server in (near, far, farther):
                server.stop()
    print(f"{arguments.documents} documents a collection, 32 dimensions, p50 of {arguments.rounds} rounds")
    print(f"query, direct                       {direct:8.2f} ms")
    print(f"query, through the gateway          {gateway:8.2f} ms   overhead {gateway - direct:.2f} ms (at most {OVERHEAD_MS})")
    report_spread("this process and one service on the same processors", *here)
    report_spread(f"two services whose answers take {arguments.delay:g} ms to arrive", *elsewhere)
    slowest, _, together = elsewhere
    sys.exit(gateway - direct > OVERHEAD_MS or together > SPREAD * slowest)


if __name__ == "__main__":
    main()
