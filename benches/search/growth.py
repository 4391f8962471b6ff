"""How search grows: p50 and memory of the store at several sizes, as a table and as a plot.

    cargo bench -p ragstone-store --bench search --no-run        # prints the path of BENCH
    python benches/search/growth.py BENCH [--vectors FILE] [--sizes 10000 100000 1000000] [--svg growth.svg]

FILE holds little-endian floats, 384 per vector: real embeddings, for recall that means something. To make one of
the lines of a text file, with the default model of a running server (`ragstone quickstart`):

    apt-cache dumpavail | sed -n 's/^Description[^:]*: //p' | sort -u > texts
    python benches/search/growth.py --embed texts --server http://127.0.0.1:8000 --vectors FILE

Needs nothing but Python.
"""

import argparse
import base64
import json
import math
import pathlib
import re
import subprocess
import urllib.request

UNITS = {"ns": 1e-6, "µs": 1e-3, "ms": 1.0, "s": 1000.0}
WIDTH, HEIGHT, LEFT, TOP = 640, 300, 70, 40
COLOURS = {"dense": "#1f77b4", "keyword": "#2ca02c", "hybrid": "#d62728", "memory": "#1f77b4"}


def embed(texts, server, vectors):
    lines = pathlib.Path(texts).read_text().splitlines()
    with open(vectors, "wb") as file:
        for start in range(0, len(lines), 128):
            body = json.dumps({"input": lines[start:start + 128], "encoding_format": "base64"}).encode()
            request = urllib.request.Request(f"{server}/v1/embeddings", body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=600) as answer:
                for item in json.load(answer)["data"]:
                    file.write(base64.b64decode(item["embedding"]))
            print(f"\r{min(start + 128, len(lines)):,} of {len(lines):,}", end="", flush=True)
    print()


def milliseconds(text):
    number, unit = re.fullmatch(r"([\d.]+)(ns|µs|ms|s)", text).groups()
    return float(number) * UNITS[unit]


def measure(bench, size, vectors):
    command = [bench, "--documents", str(size)] + (["--vectors", vectors] if vectors else [])
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = lambda pattern: re.search(pattern, output).group(1)
    return {
        "size": size,
        "dense": milliseconds(found(r"dense everything: p50 (\S+)")),
        "recall": float(found(r"dense everything: .* recall@10 (\S+)")),
        "keyword": milliseconds(found(r"keyword: p50 (\S+)")),
        "hybrid": milliseconds(found(r"hybrid: p50 (\S+)")),
        "open_s": milliseconds(found(r"open (\S+)")) / 1000,
        "memory": float(found(r"resident \+(\d+) MB")),
    }


def panel(rows, names, title, top):
    """One plot with both axes logarithmic."""
    values = [max(row[name], 1e-3) for row in rows for name in names]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    sizes = [math.log10(row["size"]) for row in rows]
    across = lambda size: LEFT + (WIDTH - LEFT - 20) * (math.log10(size) - sizes[0]) / max(sizes[-1] - sizes[0], 1e-9)
    up = lambda value: top + HEIGHT - HEIGHT * (math.log10(max(value, 1e-3)) - low) / max(high - low, 1)
    parts = [f'<text x="{LEFT}" y="{top - 12}" font-weight="bold">{title}</text>']
    for power in range(low, high + 1):
        y = up(10**power)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10**power:g}</text>')
    for row in rows:
        parts.append(f'<text x="{across(row["size"]):.1f}" y="{top + HEIGHT + 18}" text-anchor="middle">{row["size"]:,}</text>')
    for number, name in enumerate(names):
        points = " ".join(f'{across(row["size"]):.1f},{up(row[name]):.1f}' for row in rows)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>')
        parts += [f'<circle cx="{across(r["size"]):.1f}" cy="{up(r[name]):.1f}" r="3" fill="{COLOURS[name]}"/>' for r in rows]
        parts.append(f'<text x="{LEFT + 10}" y="{top + 16 + 16 * number}" fill="{COLOURS[name]}">{name}</text>')
    return "\n".join(parts)


def draw(rows, path):
    height = 2 * (HEIGHT + TOP + 40)
    plots = [
        panel(rows, ["dense", "keyword", "hybrid"], "p50 of a search in process, ms, by documents", TOP),
        panel(rows, ["memory"], "memory of the open store, MB, by documents", TOP + HEIGHT + 80),
    ]
    pathlib.Path(path).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>\n' + "\n".join(plots) + "\n</svg>\n"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", nargs="?")
    parser.add_argument("--vectors")
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--svg", default="growth.svg")
    parser.add_argument("--embed", metavar="TEXTS")
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    options = parser.parse_args()
    if options.embed:
        return embed(options.embed, options.server, options.vectors)
    if not options.bench:
        parser.error("which program? See the first lines of this file")
    rows = []
    print("| documents | dense p50 | recall@10 | keyword p50 | hybrid p50 | opened in | memory |")
    print("|---|---|---|---|---|---|---|")
    for size in options.sizes:
        row = measure(options.bench, size, options.vectors)
        rows.append(row)
        print(f"| {size:,} | {row['dense']:.2f} ms | {row['recall']:.4f} | {row['keyword']:.2f} ms | "
              f"{row['hybrid']:.2f} ms | {row['open_s']:.2f} s | {row['memory']:.0f} MB |", flush=True)
    draw(rows, options.svg)


if __name__ == "__main__":
    main()
