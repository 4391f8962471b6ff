#!/usr/bin/env python3
"""Embedding and reranking speed, side by side with sentence-transformers and onnxruntime.

    cargo build --release -p ragstone-models --example model-bench
    python benches/models/run.py --model DIRECTORY_OF_ALL_MINILM_L6_V2 --bench target/release/examples/model-bench

Needs sentence-transformers, transformers, torch, onnx and onnxruntime. All engines get the same texts
and the same number of threads, and take turns round by round, so that a noisy machine disturbs all of
them; a ratio is the median over the rounds of the ratio within a round.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS = (
    "retrieval passage vector question model answer encoder city number water energy system people market history "
    "science river mountain computer language memory storage index query document search engine window garden letter "
    "music theory pressure boundary layer velocity supersonic temperature plate the of and in a to is that with for"
).split()
FLOPS_PER_TOKEN = 2 * 6 * (4 * 384 * 384 + 2 * 384 * 1536)


def passages(tokenizer, count, seed=7):
    """Texts of 20 to 250 tokens."""
    rng = random.Random(seed)
    texts = []
    while len(texts) < count:
        text = " ".join(rng.choices(WORDS, k=rng.randint(18, 248)))
        if 20 <= len(tokenizer(text)["input_ids"]) <= 250:
            texts.append(text)
    return texts


class Ours:
    def __init__(self, binary, threads):
        command = [binary, str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class Onnx:
    """Batches of 32 sorted by length, as sentence-transformers does it."""

    def __init__(self, path, tokenizer, threads):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.names = {value.name for value in self.session.get_inputs()}
        self.tokenizer = tokenizer

    def embed(self, texts):
        import numpy as np

        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        vectors = [None] * len(texts)
        for start in range(0, len(order), 32):
            part = order[start : start + 32]
            batch = self.tokenizer(
                [texts[i] for i in part], padding=True, truncation=True, max_length=256, return_tensors="np"
            )
            inputs = {name: value.astype(np.int64) for name, value in batch.items() if name in self.names}
            hidden = self.session.run(None, inputs)[0]
            mask = batch["attention_mask"][..., None].astype(np.float32)
            mean = (hidden * mask).sum(1) / mask.sum(1)
            mean /= np.linalg.norm(mean, axis=1, keepdims=True)
            for i, vector in zip(part, mean):
                vectors[i] = vector
        return np.array(vectors)


def export_onnx(directory, target):
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from transformers import AutoModel

    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = AutoModel.from_pretrained(directory, attn_implementation="eager").eval()

        def forward(self, ids, mask, types):
            return self.model(input_ids=ids, attention_mask=mask, token_type_ids=types).last_hidden_state

    ids = torch.ones(2, 8, dtype=torch.long)
    names = ["input_ids", "attention_mask", "token_type_ids"]
    axes = {name: {0: "batch", 1: "length"} for name in [*names, "hidden"]}
    plain, small = target / "model.onnx", target / "model-int8.onnx"
    with torch.no_grad():
        torch.onnx.export(
            Encoder(), (ids, ids, ids * 0), str(plain), input_names=names, output_names=["hidden"], dynamic_axes=axes,
            opset_version=17, dynamo=False,
        )
    quantize_dynamic(str(plain), str(small), weight_type=QuantType.QInt8)
    return plain, small


def peak_gflops(size=1536, repeats=4):
    """What the matrix products of torch and of numpy (OpenBLAS) reach on this machine now, whichever is faster."""
    import numpy as np
    import torch

    best = float("inf")
    for matrix in (torch.rand(size, size), np.random.rand(size, size).astype(np.float32)):
        for _ in range(repeats):
            best = min(best, timed(lambda: matrix @ matrix)[0])
    return 2 * size**3 / best / 1e9


def timed(function):
    start = time.perf_counter()
    value = function()
    return time.perf_counter() - start, value


def in_own_process(code, *arguments):
    """Peak memory in MB of another engine, measured in a process of its own."""
    environment = dict(os.environ, OMP_NUM_THREADS="2")
    output = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment)
    return float(output.stdout.strip().splitlines()[-1]) if output.returncode == 0 else float("nan")


ST_MEMORY = """
import sys, json, resource
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], device='cpu')
model.encode(json.load(open(sys.argv[2])), batch_size=32)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def cosines(vectors, reference):
    import numpy as np

    return (vectors * reference).sum(1) / np.linalg.norm(vectors, axis=1) / np.linalg.norm(reference, axis=1)


# As a model is run where nothing is said about it, with all bits, and with as few as there is a choice of.
KINDS = {"ragstone": None, "ragstone f32": "none", "ragstone int8": "int8"}


def loading(arguments, quantize):
    process = Ours(arguments.bench, arguments.threads)
    seconds = process.ask(do="load", directory=arguments.model, quantize=quantize)["seconds"]
    process.close()
    return seconds


def embedding(arguments, work):
    import numpy as np
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(arguments.model, device="cpu")
    texts = passages(model.tokenizer, arguments.passages)
    query = "what is the history of the river and the mountain city"
    # Loading is measured in processes of its own: the memory is that of one that loads the model once.
    loads = {kind: statistics.median(loading(arguments, value) for _ in range(5)) for kind, value in KINDS.items()}
    ours = {kind: Ours(arguments.bench, arguments.threads) for kind in KINDS}
    for kind, process in ours.items():
        process.ask(do="load", directory=arguments.model, quantize=KINDS[kind])
    plain, small = export_onnx(arguments.model, work)
    f32, int8 = (Onnx(path, model.tokenizer, arguments.threads) for path in (plain, small))
    engines = {kind: lambda t, process=process: process.ask(do="embed", texts=t)["seconds"] for kind, process in ours.items()}
    engines |= {
        "onnxruntime f32": lambda t: timed(lambda: f32.embed(t))[0],
        "sentence-transformers": lambda t: timed(lambda: model.encode(t, batch_size=32))[0],
        "onnxruntime int8": lambda t: timed(lambda: int8.embed(t))[0],
    }
    tokens = ours["ragstone"].ask(do="embed", texts=texts)["tokens"]
    rates = {name: [] for name in engines}
    latencies = {name: [] for name in engines}
    peak = 0.0
    for _ in range(arguments.rounds):
        peak = max(peak, peak_gflops())
        for name, run in engines.items():
            time.sleep(0.1)  # until the threads of the engine before no longer spin
            run(texts[:32])
            rates[name].append(tokens / run(texts))
        for name, run in engines.items():
            time.sleep(0.1)
            run([query])
            latencies[name].append(statistics.median(run([query]) for _ in range(40)) * 1e3)
    vectors = {
        kind: np.array(process.ask(do="embed", texts=texts, vectors=True)["vectors"]) for kind, process in ours.items()
    }
    reference = model.encode(texts, batch_size=32)
    passages_file = work / "passages.json"
    passages_file.write_text(json.dumps(texts))

    def ratio(values, name, other):
        return statistics.median(a / b for a, b in zip(values[name], values[other]))

    print(f"{len(texts)} passages, {tokens} tokens, {arguments.threads} threads, {arguments.rounds} rounds\n")
    print("| engine | tokens/s | " + " | ".join(f"{kind} is" for kind in KINDS) + " | one query p50 | "
          + " | ".join(f"{kind} takes" for kind in KINDS) + " |\n|---" + "|---" * (2 + 2 * len(KINDS)) + "|")
    for name in engines:
        faster = " | ".join(f"{ratio(rates, kind, name):.2f} ×" for kind in KINDS)
        shorter = " | ".join(f"{ratio(latencies, kind, name):.2f} ×" for kind in KINDS)
        print(f"| {name} | {statistics.median(rates[name]):,.0f} | {faster} | "
              f"{statistics.median(latencies[name]):.2f} ms | {shorter} |")
    print()
    for kind, process in ours.items():
        print(f"{kind}: load {loads[kind]:.3f} s, peak memory {process.ask(do='memory')['peak_mb']:.0f} MB")
    print(f"sentence-transformers: peak memory {in_own_process(ST_MEMORY, arguments.model, str(passages_file)):.0f} MB")
    agreement = {
        "ragstone to sentence-transformers": cosines(vectors["ragstone"], reference),
        "ragstone f32 to sentence-transformers": cosines(vectors["ragstone f32"], reference),
        "ragstone int8 to ragstone f32": cosines(vectors["ragstone int8"], vectors["ragstone f32"]),
        "onnxruntime int8 to onnxruntime f32": cosines(int8.embed(texts), f32.embed(texts)),
    }
    for name, values in agreement.items():
        print(f"cosine of {name}: lowest {values.min():.7f}, mean {values.mean():.7f}")
    reached = max(rates["ragstone f32"]) * FLOPS_PER_TOKEN / 1e9
    print(f"products with weights, f32: {reached:.0f} GFLOPS in the best round, {100 * reached / peak:.0f} % of the "
          f"{peak:.0f} GFLOPS that the best plain {arguments.threads}-thread product of the run reached")
    for process in ours.values():
        process.close()


SIZES = {
    "tiny": ("Bert", dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512)),
    "MiniLM-sized": ("Bert", dict(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)),
    "XLM-R-base-sized": ("XLMRoberta", dict(
        hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
        # The benchmark's tokenizer is BERT's, which tells question and text apart by type.
        type_vocab_size=2,
        max_position_embeddings=514, pad_token_id=1)),
}


def reranking(arguments, work):
    import transformers
    from sentence_transformers import CrossEncoder

    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)
    query = "what is the history of the river and the mountain city"
    texts = passages(tokenizer, 100, seed=8)
    print("\n| 100 pairs | ragstone | sentence-transformers | ragstone is | largest difference | 10 pairs |")
    print("|---|---|---|---|---|---|")
    for name in arguments.sizes:
        family, settings = SIZES[name]
        directory = work / name
        config = getattr(transformers, f"{family}Config")(num_labels=1, vocab_size=len(tokenizer), **settings)
        getattr(transformers, f"{family}ForSequenceClassification")(config).save_pretrained(directory)
        tokenizer.model_max_length = 512
        tokenizer.save_pretrained(directory)
        theirs = CrossEncoder(str(directory), device="cpu")
        ours = Ours(arguments.bench, arguments.threads)
        ours.ask(**{"do": "load-cross-encoder", "directory": str(directory)})
        pairs = [(query, text) for text in texts]
        ours.ask(do="score", query=query, texts=texts[:4])
        theirs.predict(pairs[:4])
        mine, other, ten, scores = [], [], [], None
        for _ in range(max(2, arguments.rounds // 2)):
            answer = ours.ask(do="score", query=query, texts=texts)
            mine.append(answer["seconds"])
            seconds, scores = timed(lambda: theirs.predict(pairs))
            other.append(seconds)
            ten.append(ours.ask(do="score", query=query, texts=texts[:10])["seconds"])
        difference = max(abs(a - b) for a, b in zip(answer["scores"], scores))
        ratio = statistics.median(b / a for a, b in zip(mine, other))
        print(f"| {name} | {statistics.median(mine) * 1e3:,.0f} ms | {statistics.median(other) * 1e3:,.0f} ms | "
              f"{ratio:.2f} × | {difference:.1e} | {statistics.median(ten) * 1e3:,.0f} ms |", flush=True)
        ours.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--bench", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--passages", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES), help="rerankers to measure")
    parser.add_argument("--only", choices=["embedding", "reranking"])
    arguments = parser.parse_args()
    os.environ["OPENBLAS_NUM_THREADS"] = str(arguments.threads)
    import torch

    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as work:
        if arguments.only != "reranking":
            embedding(arguments, Path(work))
        if arguments.only != "embedding":
            reranking(arguments, Path(work))


if __name__ == "__main__":
    main()
