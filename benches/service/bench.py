"""Ragstone beside ChromaDB: the same documents, the same questions, in one run.

    python benches/service/bench.py [--documents 200000] [--add 100000] [--output results.md]

Needs `numpy`, `orjson` and `chromadb==1.5.9` in the Python that runs it, and a release build of the
server (`cargo build --release`). Both servers run on this machine, on their own data folders.
Chroma is written to and filtered through its own Python client, as its users do. Searches go to
both as plain HTTP from the same client code, so that only the servers differ.
"""

import argparse
import concurrent.futures
import http.client
import json
import multiprocessing
import os
import pathlib
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse

import numpy
import orjson

ROOT = pathlib.Path(__file__).resolve().parents[2]
WIDTH = 384


# --- data -----------------------------------------------------------------------------------------

def vectors(count, seed):
    """Clustered unit vectors: a few hundred topics with documents around them."""
    rng = numpy.random.default_rng(seed)
    centres = numpy.random.default_rng(7).standard_normal((400, WIDTH), dtype=numpy.float32)
    points = centres[rng.integers(0, len(centres), count)]
    points += 0.8 * rng.standard_normal((count, WIDTH), dtype=numpy.float32)
    return points / numpy.linalg.norm(points, axis=1, keepdims=True)


def metadata(index):
    return {
        "lang": ["en", "de", "fr", "es"][index % 4],
        "topic": f"topic-{index % 50}",
        "year": 1990 + index % 35,
        "source": f"source-{index % 5000}",
        "half": index % 2,
        "tenth": index % 10,
        "hundredth": index % 100,
        "rare": index % 5000,
    }


def text(index):
    words = ["filter", "vector", "index", "query", "token", "model", "store", "graph", "cache", "shard"]
    return f"document {index} about {words[index % 10]} and {words[(index // 10) % 10]} in part {index % 977}"


# --- servers --------------------------------------------------------------------------------------

def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def resident_mb(pid):
    """Of the process and its children."""
    pids = [pid] + [int(p) for p in subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()]
    total = 0
    for one in pids:
        try:
            status = pathlib.Path(f"/proc/{one}/status").read_text()
        except FileNotFoundError:
            continue
        total += int(re.search(r"VmRSS:\s+(\d+)", status).group(1))
    return total / 1024


class Ragstone:
    name = "Ragstone"

    def __init__(self, folder):
        self.folder = folder
        self.start()

    def start(self):
        self.port = free_port()
        begun = time.perf_counter()
        binary = ROOT / "target" / "release" / "ragstone"
        self.process = subprocess.Popen(
            [binary, "serve", "--no-embeddings", "--port", str(self.port), "--data-dir", self.folder],
            stderr=subprocess.DEVNULL)
        wait_for(self.port, "/readyz")
        self.ready_after = time.perf_counter() - begun
        self.connection = http.client.HTTPConnection("127.0.0.1", self.port)

    def stop(self):
        self.process.terminate()
        self.process.wait()

    def call(self, method, path, body=None):
        return call(self.connection, method, path, body)

    def create(self, name):
        self.call("POST", "/collections", orjson.dumps({"name": name}))

    def add(self, name, ids, points):
        documents = [{"id": str(i), "text": text(i), "metadata": metadata(i), "embedding": point}
                     for i, point in zip(ids, points)]
        self.call("POST", f"/collections/{name}/documents", orjson.dumps({"documents": documents}, option=orjson.OPT_SERIALIZE_NUMPY))

    def get(self, name, where):
        query = urllib.parse.urlencode({"where": json.dumps(where), "limit": 100})
        return self.call("GET", f"/collections/{name}/documents?{query}")

    def search_request(self, name, point, where):
        body = {"query_embedding": point, "top_k": 10, **({"where": where} if where else {})}
        return f"/collections/{name}/query", orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)

    def found(self, answer):
        return [hit["id"] for hit in answer["results"]]


class Chroma:
    name = "Chroma 1.5.9"

    def __init__(self, folder):
        import chromadb
        self.port = free_port()
        chroma = pathlib.Path(sys.executable).parent / "chroma"
        self.process = subprocess.Popen(
            [chroma, "run", "--path", folder, "--host", "127.0.0.1", "--port", str(self.port)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(self.port, "/api/v2/heartbeat")
        self.client = chromadb.HttpClient(host="127.0.0.1", port=self.port)
        self.collections = {}
        self.connection = http.client.HTTPConnection("127.0.0.1", self.port)

    def stop(self):
        self.process.terminate()
        self.process.wait()

    def call(self, method, path, body=None):
        return call(self.connection, method, path, body)

    def create(self, name):
        self.collections[name] = self.client.create_collection(name, configuration={"hnsw": {"space": "cosine"}})

    def add(self, name, ids, points):
        self.collections[name].add(
            ids=[str(i) for i in ids], embeddings=points, documents=[text(i) for i in ids],
            metadatas=[metadata(i) for i in ids])

    def get(self, name, where):
        return self.collections[name].get(where=where, limit=100, include=["documents", "metadatas"])

    def search_request(self, name, point, where):
        body = {"query_embeddings": [point], "n_results": 10, "include": ["documents", "metadatas", "distances"],
                **({"where": where} if where else {})}
        path = f"/api/v2/tenants/default_tenant/databases/default_database/collections/{self.collections[name].id}/query"
        return path, orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)

    def found(self, answer):
        return answer["ids"][0]


def wait_for(port, path):
    for _ in range(1200):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.02)
    raise SystemExit(f"no server on port {port}")


def call(connection, method, path, body=None):
    try:
        connection.request(method, path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
    except (BrokenPipeError, ConnectionResetError, http.client.RemoteDisconnected):
        # A server may close a connection that has been idle for long.
        connection.close()
        connection.request(method, path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
    raw = answer.read()
    if answer.status != 200:
        raise SystemExit(f"{method} {path}: {answer.status} {raw[:300]}")
    return orjson.loads(raw)


# --- measuring ------------------------------------------------------------------------------------

def p50_ms(times):
    return statistics.median(times) * 1000


def timed(function, rounds):
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        function()
        times.append(time.perf_counter() - begun)
    return p50_ms(times)


def add_all(server, name, points, batch):
    begun = time.perf_counter()
    for start in range(0, len(points), batch):
        server.add(name, range(start, min(start + batch, len(points))), points[start:start + batch])
    return len(points) / (time.perf_counter() - begun)


def exact(points, query, mask, k=10):
    candidates = numpy.flatnonzero(mask)
    scores = points[candidates] @ query
    return {str(i) for i in candidates[numpy.argsort(-scores, kind="stable")[:k]]}


def search_times(server, name, queries, where, rounds=200):
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    times, found = [], []
    for query in queries[:rounds]:
        path, body = server.search_request(name, query, where)
        begun = time.perf_counter()
        answer = call(connection, "POST", path, body)
        times.append(time.perf_counter() - begun)
        found.append(server.found(answer))
    return p50_ms(times), found


def hammer(port, requests, seconds):
    connection = http.client.HTTPConnection("127.0.0.1", port)
    until, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        path, body = requests[count % len(requests)]
        connection.request("POST", path, body, {"content-type": "application/json"})
        connection.getresponse().read()
        count += 1
    return count


def throughput(server, name, queries, clients=8, seconds=5):
    requests = [server.search_request(name, query, None) for query in queries[:64]]
    with concurrent.futures.ProcessPoolExecutor(clients, mp_context=multiprocessing.get_context("fork")) as pool:
        counts = list(pool.map(hammer, [server.port] * clients, [requests] * clients, [seconds] * clients))
    return sum(counts) / seconds


FILTERS = {
    "equality": ({"lang": "de"}, {"lang": "de"}),
    "$in": ({"year": {"$in": [1991, 1999, 2005]}},) * 2,
    "$or": ({"$or": [{"topic": "topic-3"}, {"topic": "topic-7"}]},) * 2,
    "$and": ({"$and": [{"lang": "en"}, {"year": {"$gte": 2010}}]},) * 2,
    "$ne": ({"topic": {"$ne": "topic-1"}},) * 2,
}
SHARES = {"none": None, "50 %": {"half": 1}, "10 %": {"tenth": 3}, "1 %": {"hundredth": 42}, "0.02 %": {"rare": 77}}
SHARE_OF = {"none": lambda i: i >= 0, "50 %": lambda i: i % 2 == 1, "10 %": lambda i: i % 10 == 3,
            "1 %": lambda i: i % 100 == 42, "0.02 %": lambda i: i % 5000 == 77}


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--documents", type=int, default=200_000, help="for filters, start-up and memory")
    arguments.add_argument("--add", type=int, default=100_000, help="for adding and searching")
    arguments.add_argument("--output", type=pathlib.Path)
    options = arguments.parse_args()
    lines = []

    def say(line=""):
        print(line, flush=True)
        lines.append(line)

    base = tempfile.mkdtemp(prefix="ragstone-bench-")
    ours, theirs = Ragstone(f"{base}/ragstone"), Chroma(f"{base}/chroma")
    try:
        run(ours, theirs, options, say)
    finally:
        ours.stop()
        theirs.stop()
        shutil.rmtree(base, ignore_errors=True)
    if options.output:
        options.output.write_text("\n".join(lines) + "\n")


def run(ours, theirs, options, say):
    points = vectors(options.documents, 1)
    queries = vectors(512, 2)
    part = points[:options.add]

    say(f"{os.cpu_count()} cores; {WIDTH} dimensions; {options.add:,} documents for adding and searching, {options.documents:,} for the rest.")
    say()
    say("| work | Ragstone | Chroma 1.5.9 | ratio |")
    say("|---|---|---|---|")

    def row(work, mine, other, unit, more_is_better=False):
        ratio = mine / other if more_is_better else other / mine
        say(f"| {work} | {mine:,.2f} {unit} | {other:,.2f} {unit} | {ratio:,.1f} × |")

    for server in (ours, theirs):
        server.create("search")
    mine, other = add_all(ours, "search", part, 1000), add_all(theirs, "search", part, 1000)
    row(f"add {options.add:,} documents, acknowledged", mine, other, "documents/s", True)

    ids = numpy.arange(options.add)
    for share, where in SHARES.items():
        search_times(ours, "search", queries, where, 20), search_times(theirs, "search", queries, where, 20)
        mine, mine_found = search_times(ours, "search", queries, where)
        other, other_found = search_times(theirs, "search", queries, where)
        row(f"search, filter keeps {share if where else 'all'}: p50", mine, other, "ms")
        mask = SHARE_OF[share](ids)
        wanted = [exact(part, query, mask) for query in queries[:200]]
        recall = lambda found: sum(len(w & set(f)) for w, f in zip(wanted, found)) / sum(map(len, wanted))
        say(f"| … recall@10 | {recall(mine_found):.4f} | {recall(other_found):.4f} | |")
    row("search, 8 clients at once", throughput(ours, "search", queries), throughput(theirs, "search", queries), "queries/s", True)

    for server in (ours, theirs):
        server.create("large")
        add_all(server, "large", points, 2000)
    for name, (mine_filter, other_filter) in FILTERS.items():
        mine = timed(lambda: ours.get("large", mine_filter), 100)
        other = timed(lambda: theirs.get("large", other_filter), 10)
        row(f"get 100 of {options.documents:,} by {name}: p50", mine, other, "ms")
    say(f"| distinct values of a field with 5,000: p50 | {timed(lambda: ours.call('GET', '/collections/large/metadata-values?field=source'), 50):.2f} ms | not offered | |")

    for server in (ours, theirs):
        if server is ours:
            ours.call("DELETE", "/collections/search")
        else:
            theirs.client.delete_collection("search")
    search_times(theirs, "large", queries, None, 50), search_times(ours, "large", queries, None, 50)
    time.sleep(5)
    row(f"memory with {options.documents:,} documents", resident_mb(ours.process.pid), resident_mb(theirs.process.pid), "MB")

    ours.stop()
    ours.start()
    say(f"| start with {options.documents:,} documents until ready | {ours.ready_after:.2f} s | not measured | |")
    row("memory after a restart, all searched once", memory_after_search(ours, queries), resident_mb(theirs.process.pid), "MB")
    ours.create("emptied")
    add_all(ours, "emptied", points[:50_000], 2000)
    begun = time.perf_counter()
    answer = ours.call("DELETE", "/collections/emptied/documents/all")
    say(f"| empty {answer['count_deleted']:,} documents | {time.perf_counter() - begun:.2f} s | not offered | |")


def memory_after_search(server, queries):
    search_times(server, "large", queries, None, 50)
    return resident_mb(server.process.pid)


if __name__ == "__main__":
    main()
