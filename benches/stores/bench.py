"""The service over Postgres and over ChromaDB, beside the engine's own client doing the same query in the
same run.

    python benches/stores/bench.py --binary target/release/ragstone --postgres postgres://user:password@host/database
    python benches/stores/bench.py --binary target/release/ragstone --chroma 127.0.0.1:8000

Either or both. The database should be empty, the ChromaDB server without a collection `bench`. Needs numpy,
psycopg for Postgres and chromadb for ChromaDB. --documents makes it smaller. With --embeddings FILE (an
embeddings.yml) the last part over Postgres compares one process with two, each with one compute thread,
embedding queries in process: for a small collection `texts`, and for the large one. Where they share the
processors with Postgres, the work a query is for each tells how much faster two can be at all.
"""

import argparse
import concurrent.futures
import http.client
import json
import os
import pathlib
import re
import socket
import statistics
import subprocess
import tempfile
import threading
import time

import numpy

DIMENSIONS = 384
TOP = 10
# What a process may take of a processor where two are to have machines of their own.
SHARE = 0.4
WORDS = [f"word{n}" for n in range(5000)]


def vectors(count, rng, centres):
    """Directions in clusters, as embeddings of texts are."""
    made = centres[rng.integers(len(centres), size=count)] + 0.55 * rng.standard_normal(
        (count, DIMENSIONS), dtype=numpy.float32
    ) / numpy.sqrt(DIMENSIONS) * 4
    return (made / numpy.linalg.norm(made, axis=1, keepdims=True)).astype(numpy.float32)


class Server:
    def __init__(self, arguments, *extra, store=""):
        """Over the embedded store, unless another is named."""
        self.folder = tempfile.TemporaryDirectory()
        environment = dict(os.environ, RAGSTONE_STORE=store)
        command = [arguments.binary, "serve", "--port", "0", "--data-dir", self.folder.name, *extra]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True)
        for line in self.process.stderr:
            found = re.search(r"listening on http://([\d.]+):(\d+)", line)
            if found:
                self.address = (found[1], int(found[2]))
                break
        else:
            raise SystemExit("the server does not start")
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        self.local = threading.local()

    def ask(self, method, path, body=None):
        connection = getattr(self.local, "connection", None)
        if connection is None:
            connection = self.local.connection = http.client.HTTPConnection(*self.address, timeout=120)
        payload, headers = body and json.dumps(body), {"content-type": "application/json"}
        try:
            connection.request(method, path, payload, headers)
            answer = connection.getresponse()
        except (BrokenPipeError, ConnectionResetError, http.client.RemoteDisconnected):
            # A server may close a connection that has been idle for long.
            connection.close()
            connection.request(method, path, payload, headers)
            answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise SystemExit(f"{method} {path}: {answer.status} {text[:300]}")
        return json.loads(text)

    def stop(self):
        self.process.terminate()
        self.process.wait()


def fill(server, data, name="bench", batch=500):
    server.ask("POST", "/collections", {"name": name})
    rng = numpy.random.default_rng(2)
    started = time.monotonic()
    for first in range(0, len(data), batch):
        documents = [
            {
                "id": f"d{n}",
                "text": " ".join(WORDS[w] for w in rng.integers(len(WORDS), size=40)),
                "metadata": {"percent": n % 100, "kind": ["a", "b", "c"][n % 3]},
                "embedding": data[n].round(6).tolist(),
            }
            for n in range(first, min(first + batch, len(data)))
        ]
        server.ask("POST", f"/collections/{name}/documents", {"documents": documents})
    return len(data) / (time.monotonic() - started)


def wait_for_index(database):
    started = time.monotonic()
    while True:
        row = database.execute(
            "SELECT relation FROM ragstone.collections WHERE name = 'bench' AND EXISTS (SELECT FROM pg_index"
            " JOIN pg_class ON pg_class.oid = indexrelid WHERE relname = 'near_' || relation AND indisvalid)"
        ).fetchone()
        if row:
            return row[0], time.monotonic() - started
        time.sleep(1)


def milliseconds(work):
    started = time.perf_counter()
    answer = work()
    return 1000 * (time.perf_counter() - started), answer


def compare(server, database, table, data, queries, below):
    """p50 of the service and of the client, and the recall of the service."""
    database.execute("SET hnsw.iterative_scan = 'relaxed_order'")
    database.execute("SET hnsw.ef_search = 200")
    condition = "" if below == 100 else f"WHERE ({' OR '.join(['fields @> %s::jsonb'] * below)})"
    values = [] if below == 100 else [json.dumps({"=percent": [n]}) for n in range(below)]
    sql = (
        f"SELECT id, metadata, body, embedding <#> %s::vector FROM {table} {condition}"
        f" ORDER BY embedding::halfvec({DIMENSIONS}) <#> %s::halfvec({DIMENSIONS}) LIMIT {TOP}"
    )

    def by_client(query):
        # Each side writes the vector in its own way, within its time.
        text = str(query)
        return [row[0] for row in database.execute(sql, [text, *values, text]).fetchall()]

    return taking_turns(server, by_client, data, queries, below)


def taking_turns(server, ask_client, data, queries, below):
    """p50 of the service and of the client, and the recall of both. The client is asked with a list of
    numbers and answers with ids."""
    passing = numpy.flatnonzero(numpy.arange(len(data)) % 100 < below)
    ours, theirs, right, theirs_right = [], [], 0, 0
    for query in queries:
        numbers = query.tolist()
        body = {"query_embedding": numbers, "top_k": TOP}
        if below < 100:
            body["where"] = {"percent": {"$in": list(range(below))}}

        def by_client():
            return ask_client(numbers)

        def by_service():
            return server.ask("POST", "/collections/bench/query", body)

        # In turns, because the second finds the pages that the first has read.
        first, second = (by_client, by_service) if len(ours) % 2 else (by_service, by_client)
        answers = {work: milliseconds(work) for work in (first, second)}
        took, found = answers[by_client]
        theirs.append(took)
        took, answer = answers[by_service]
        ours.append(took)
        near = passing[numpy.argsort(-(data[passing] @ query))[:TOP]]
        expected = {f"d{n}" for n in near}
        right += sum(hit["id"] in expected for hit in answer["results"])
        theirs_right += sum(id in expected for id in found)
    total = TOP * len(queries)
    return (
        statistics.median(ours),
        statistics.median(theirs),
        right / total,
        theirs_right / total,
    )


def request(collection, text):
    body = json.dumps({"query": text, "top_k": TOP}).encode()
    head = (
        f"POST /collections/{collection}/query HTTP/1.1\r\nhost: localhost\r\n"
        "content-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def exchange(connection, request):
    """As little as a client can do, because it shares the processors with what is measured."""
    connection.sendall(request)
    answer = connection.recv(1 << 16)
    head = answer.index(b"\r\n\r\n") + 4
    length = int(re.search(rb"content-length: (\d+)", answer[:head], re.IGNORECASE)[1])
    if not answer.startswith(b"HTTP/1.1 200"):
        raise SystemExit(answer)
    got = len(answer) - head
    while got < length:
        got += len(connection.recv(1 << 16))


def work_of(process):
    """Seconds of a processor that it took until now."""
    fields = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def work_of_postgres():
    total = 0
    for path in pathlib.Path("/proc").glob("[0-9]*/comm"):
        try:
            if path.read_text().strip() == "postgres":
                total += work_of(path.parent.name)
        except OSError:
            pass  # It ended meanwhile.
    return total


class Throughput:
    """Queries a second, by texts of so many words, shared evenly, and the work a query is for each."""

    def __init__(self, servers, collection, words, seconds=10, clients=8):
        rng = numpy.random.default_rng(5)
        texts = [" ".join(WORDS[w] for w in rng.integers(len(WORDS), size=words)) for _ in range(1000)]
        requests = [request(collection, text) for text in texts]
        parties = {
            "service": lambda: sum(work_of(server.process.pid) for server in servers),
            "Postgres": work_of_postgres,
            "client": lambda: work_of(os.getpid()),
        }
        before = {name: work() for name, work in parties.items()}
        end = time.monotonic() + seconds

        def run(number):
            done = 0
            with socket.create_connection(servers[number % len(servers)].address) as connection:
                while time.monotonic() < end:
                    exchange(connection, requests[(number * 131 + done) % len(requests)])
                    done += 1
            return done

        with concurrent.futures.ThreadPoolExecutor(clients) as pool:
            done = sum(pool.map(run, range(clients)))
        self.rate = done / seconds
        self.work = {name: 1000 * (work() - before[name]) / done for name, work in parties.items()}


class Share:
    """So much of a processor for one process, where the kernel lets us: as if it had a small machine."""

    PERIOD = 10_000

    def __init__(self, process, share):
        quota = int(self.PERIOD * share)
        old, new = pathlib.Path("/sys/fs/cgroup/cpu"), pathlib.Path("/sys/fs/cgroup")
        self.group = (old if old.is_dir() else new) / f"ragstone-bench-{process.pid}"
        self.group.mkdir()
        if old.is_dir():
            (self.group / "cpu.cfs_period_us").write_text(str(self.PERIOD))
            (self.group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (self.group / "cpu.max").write_text(f"{quota} {self.PERIOD}")
        (self.group / "cgroup.procs").write_text(str(process.pid))

    def end(self):
        self.group.rmdir()


def processes(arguments, database):
    options = ["--embeddings-config", arguments.embeddings, "--threads", "1"]
    one = Server(arguments, *options, store=arguments.postgres)
    model = one.ask("GET", "/health")["embedding_models"][0]["id"]
    one.ask("POST", "/collections", {"name": "texts", "embedding_model": model})
    rng = numpy.random.default_rng(6)
    documents = [
        {"text": " ".join(WORDS[w] for w in rng.integers(len(WORDS), size=8))} for _ in range(2000)
    ]
    one.ask("POST", "/collections/texts/documents", {"documents": documents})
    one.ask("PUT", "/collections/bench/metadata", {"metadata": {"embedding_model": model}})
    two = Server(arguments, *options, store=arguments.postgres)
    # What Postgres does later on its own, after so many writes, would count as work of the queries.
    for command in ("VACUUM ANALYZE", "CHECKPOINT"):
        database.execute(command)

    def scaling(where, collection, words):
        alone, both, again = (Throughput(servers, collection, words) for servers in ([one], [one, two], [one]))
        faster = both.rate / max(alone.rate, again.rate)
        print(
            f"{where}, {collection}, queries of {words} words: one process {alone.rate:.0f} and {again.rate:.0f} queries/s, "
            f"two {both.rate:.0f}: x {faster:.2f}"
        )
        for name, measured in (("one", alone), ("two", both)):
            work = ", ".join(f"{party} {took:.2f}" for party, took in measured.work.items())
            print(f"    milliseconds of a processor per query, {name}: {work}")

    for collection in ("texts", "bench"):
        for words in (8, 32):
            scaling("Postgres, the client and the processes on the same processors", collection, words)
    shares = []
    try:
        shares = [Share(server.process, SHARE) for server in (one, two)]
        for collection in ("texts", "bench"):
            scaling(f"each process with {SHARE} of a processor of its own", collection, 8)
    except OSError as error:
        print(f"shares of processors cannot be given out: {error}")
    one.stop()
    two.stop()
    for share in shares:
        share.end()


def copying(arguments, data):
    """From the embedded store to Postgres, the comparison at the end included."""
    server = Server(arguments, "--no-embeddings")
    fill(server, data, "copied")
    server.stop()
    command = [arguments.binary, "copy", "--from", server.folder.name, "--to", arguments.postgres]
    started = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    seconds = time.monotonic() - started
    print(f"copied {len(data)} documents from SQLite to Postgres in {seconds:.1f} s: {len(data) / seconds:.0f}/s")


HEADING = f"{'matching':>9} {'service p50':>12} {'client p50':>12} {'overhead':>10} {'recall':>8} {'client recall':>14}"


def show(below, ours, theirs, recall, theirs_recall):
    print(
        f"{below:>8}% {ours:>9.2f} ms {theirs:>9.2f} ms {ours - theirs:>7.2f} ms {recall:>8.4f} {theirs_recall:>14.4f}"
    )


def over_postgres(arguments, data, queries):
    import psycopg

    server = Server(arguments, "--no-embeddings", store=arguments.postgres)
    database = psycopg.connect(arguments.postgres, autocommit=True)
    print(f"Postgres: filled with {fill(server, data):.0f} documents/s over HTTP")
    relation, seconds = wait_for_index(database)
    print(f"index after {seconds:.0f} s")
    print(HEADING)
    for below in (100, 50, 20, 10, 1):
        show(below, *compare(server, database, f"ragstone.documents_{relation}", data, queries, below))
    server.stop()
    if arguments.embeddings:
        processes(arguments, database)
    # Last, because what was copied is then indexed in the background.
    copying(arguments, data)


def over_chroma(arguments, data, queries):
    """Without a filter: what the service does for filters that ChromaDB has not, its client does not do."""
    import chromadb

    server = Server(arguments, "--no-embeddings", store=f"chroma://{arguments.chroma}")
    host, port = arguments.chroma.rsplit(":", 1)
    settings = chromadb.config.Settings(anonymized_telemetry=False)
    client = chromadb.HttpClient(host=host, port=int(port), settings=settings)
    print(f"ChromaDB: filled with {fill(server, data):.0f} documents/s over HTTP")
    collection = client.get_collection("bench", embedding_function=None)

    def by_client(query):
        found = collection.query(
            query_embeddings=[query], n_results=TOP, include=["documents", "metadatas", "distances"]
        )
        return found["ids"][0]

    print(HEADING)
    show(100, *taking_turns(server, by_client, data, queries, 100))
    server.ask("DELETE", "/collections/bench")
    server.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="target/release/ragstone")
    parser.add_argument("--postgres", help="postgres://user:password@host/database")
    parser.add_argument("--chroma", help="HOST:PORT")
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--embeddings")
    arguments = parser.parse_args()
    if not (arguments.postgres or arguments.chroma):
        parser.error("name an engine: --postgres or --chroma")
    rng = numpy.random.default_rng(1)
    centres = rng.standard_normal((500, DIMENSIONS), dtype=numpy.float32)
    centres /= numpy.linalg.norm(centres, axis=1, keepdims=True)
    data = vectors(arguments.documents, rng, centres)
    queries = vectors(arguments.queries, rng, centres)
    if arguments.postgres:
        over_postgres(arguments, data, queries)
    if arguments.chroma:
        over_chroma(arguments, data, queries)


if __name__ == "__main__":
    main()
