#!/usr/bin/env python3
"""Ingestion: what doing it again costs, how near it comes to the speed of the model, and its memory.

    cargo build --release -p ragstone
    python benches/ingest/bench.py --program target/release/ragstone

Needs nothing but Python. The default model is fetched as `ragstone models pull default` does. The
machine should be quiet; every figure is printed with what it was measured against.
"""

import argparse
import base64
import http.server
import json
import math
import random
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

WORDS = (
    "retrieval passage vector question model answer encoder city number water energy system people market history "
    "science river mountain computer language memory storage index query document search engine window garden letter "
    "music theory pressure boundary layer velocity supersonic temperature plate the of and in a to is that with for"
).split()


def sentence(rng, words):
    return " ".join(rng.choices(WORDS, k=words)).capitalize() + "."


def markdown(rng, number):
    parts = [f"# Document {number}\n"]
    for section in range(rng.randint(2, 5)):
        parts.append(f"## Part {section} of {number}\n")
        parts += [" ".join(sentence(rng, rng.randint(8, 20)) for _ in range(rng.randint(2, 6))) + "\n" for _ in range(2)]
    return "\n".join(parts)


def write_folder(folder, files):
    rng = random.Random(11)
    for number in range(files):
        path = folder / f"{number % 40:02}" / f"{number}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(markdown(rng, number))


def peak_kib(pid, stop, peaks):
    """The largest resident size seen, from the kernel's own high-water mark."""
    while not stop.wait(0.1):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return
        for line in status.splitlines():
            if line.startswith("VmHWM"):
                peaks.append(int(line.split()[1]))


def ingest(program, arguments, cwd):
    """The report, the seconds the whole command took, and its peak memory in MB."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [program, "ingest", *arguments, "--json"], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    stop, peaks = threading.Event(), [0]
    watcher = threading.Thread(target=peak_kib, args=(process.pid, stop, peaks))
    watcher.start()
    output = process.communicate()[0]
    seconds = time.perf_counter() - start
    stop.set()
    watcher.join()
    if process.returncode != 0:
        sys.exit(f"ingest {arguments} failed")
    return json.loads(output), seconds, max(peaks) / 1024


def chunks_of(program, folder, cwd):
    output = subprocess.run(
        [program, "ingest", folder, "--collection", "x", "--dry-run", "--json"],
        cwd=cwd, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ).stdout
    return [json.loads(line)["text"] for line in output.splitlines()]


def raw_rate(program, texts, cwd):
    """Tokens a second of the model alone: the same chunks, over HTTP, four requests at a time."""
    process = subprocess.Popen(
        [program, "quickstart", "--port", "0", "--data-dir", "raw"],
        cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )
    try:
        address = next(line.split("http://")[1].split()[0].strip(",") for line in process.stderr if "listening on" in line)
        threading.Thread(target=process.stderr.read, daemon=True).start()
        slices = [texts[at : at + 128] for at in range(0, len(texts), 128)]
        tokens, lock = [0], threading.Lock()

        def work():
            while True:
                with lock:
                    if not slices:
                        return
                    batch = slices.pop()
                body = json.dumps({"input": batch, "encoding_format": "base64"}).encode()
                request = urllib.request.Request(
                    f"http://{address}/v1/embeddings", body, {"content-type": "application/json"}
                )
                answer = json.load(urllib.request.urlopen(request, timeout=600))
                with lock:
                    tokens[0] += answer["usage"]["total_tokens"]

        start = time.perf_counter()
        threads = [threading.Thread(target=work) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        return tokens[0] / (time.perf_counter() - start)
    finally:
        process.terminate()
        process.wait()


def folder_figures(program, files, cwd):
    write_folder(Path(cwd) / "docs", files)
    base = ["docs", "--collection", "bench", "--data-dir", "data"]
    first, seconds, memory = ingest(program, base, cwd)
    print(f"first run: {files} files, {first['chunks']['embedded']} chunks, {first['tokens']} tokens in {seconds:.1f} s, {memory:.0f} MB")
    again, seconds_again, _ = ingest(program, base, cwd)
    print(f"again: {seconds_again:.2f} s for the command, {again['seconds']:.2f} s after the model is loaded, "
          f"{again['chunks']['embedded']} chunks embedded (goal: 0, < 3 s)")
    raw = raw_rate(program, chunks_of(program, "docs", cwd), cwd)
    rate = first["tokens"] / first["seconds"]
    print(f"rate: {rate:.0f} tokens/s while ingesting, {raw:.0f} of the model alone: {100 * rate / raw:.0f} % (goal: >= 90 %)")
    return {"files": files, "again_seconds": seconds_again, "again_embedded": again["chunks"]["embedded"],
            "ingest_tokens_per_second": rate, "raw_tokens_per_second": raw, "share": rate / raw}


class InstantModel(http.server.BaseHTTPRequestHandler):
    """An OpenAI-compatible model that answers at once, with vectors of 384 numbers."""

    protocol_version = "HTTP/1.1"
    # Unlike each other only by where they begin: what is in them matters to nobody here.
    vectors = [
        base64.b64encode(struct.pack("<384f", *(math.sin(0.37 * n * (at + 1)) for n in range(384)))).decode()
        for at in range(64)
    ]

    def do_POST(self):
        texts = json.loads(self.rfile.read(int(self.headers["content-length"])))["input"]
        rows = ",".join(
            f'{{"object":"embedding","index":{at},"embedding":"{self.vectors[at % 64]}"}}' for at in range(len(texts))
        )
        body = f'{{"object":"list","data":[{rows}],"model":"instant","usage":{{"prompt_tokens":0,"total_tokens":0}}}}'
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_):
        pass


def memory_figures(program, megabytes, cwd):
    """A large file with a model that takes no time, so that the pipeline and not the model is measured."""
    rng = random.Random(5)
    path = Path(cwd) / "large.jsonl"
    lines = [json.dumps({"text": " ".join(sentence(rng, 14) for _ in range(8))}) for _ in range(2000)]
    with path.open("w") as file:
        written = 0
        number = 0
        while written < megabytes << 20:
            line = lines[number % len(lines)].replace('{"text": "', f'{{"id": "r{number}", "text": "{number} ', 1)
            written += file.write(line + "\n")
            number += 1
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), InstantModel)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    (Path(cwd) / "embeddings.yml").write_text(
        "embeddings:\n  - {id: instant, provider: instant, model: instant, dimensions: 384, version: '1'}\n"
    )
    (Path(cwd) / "ragstone.yml").write_text(
        f"providers: {{instant: {{type: openai, apiKey: none, baseUrl: {json.dumps(url)}}}}}\n"
    )
    arguments = ["large.jsonl", "--collection", "large", "--data-dir", "large-data"]
    arguments += ["--embeddings-config", "embeddings.yml", "--config", "ragstone.yml"]
    report, seconds, memory = ingest(program, arguments, cwd)
    chunks = report["chunks"]["added"]
    print(f"rows: {megabytes} MB, {report['added']} rows, {chunks} chunks in {seconds:.0f} s, "
          f"peak {memory:.0f} MB (goal: <= 500 MB)")
    server.shutdown()
    return {"megabytes": megabytes, "rows": report["added"], "chunks": chunks, "seconds": seconds, "peak_mb": memory}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="target/release/ragstone")
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--megabytes", type=int, default=2048, help="size of the JSONL file")
    parser.add_argument("--only", choices=["folder", "memory"])
    arguments = parser.parse_args()
    program = str(Path(arguments.program).resolve())
    with tempfile.TemporaryDirectory() as cwd:
        figures = {}
        if arguments.only != "memory":
            figures["folder"] = folder_figures(program, arguments.files, cwd)
        if arguments.only != "folder":
            figures["memory"] = memory_figures(program, arguments.megabytes, cwd)
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
