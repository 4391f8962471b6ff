"""Measures runs with ir-measures and compares. Arguments: qrels.tsv, the folder of runs, the report of `ragstone eval --json`."""

import json
import pathlib
import sys

import ir_measures
from ir_measures import RR, R, nDCG

MEASURES = {"ndcg@10": nDCG @ 10, "recall@10": R @ 10, "recall@100": R @ 100, "mrr@10": RR @ 10}
TOLERANCE = 1e-6

judgements, runs, report = map(pathlib.Path, sys.argv[1:4])
rows = [line.split("\t") for line in judgements.read_text().splitlines()[1:]]
qrels = [ir_measures.Qrel(query, document, int(grade)) for query, document, grade in rows]
queries = {qrel.query_id for qrel in qrels}
report = json.loads(report.read_text())
assert len(report["results"]) == 6, report

seen = set()
for result in report["results"]:
    name = result["mode"] + ("-reranked" if result["rerank"] else "")
    run = list(ir_measures.read_trec_run(str(runs / f"{name}.run")))
    assert run, name
    sums = dict.fromkeys(MEASURES.values(), 0.0)
    for metric in ir_measures.iter_calc(list(MEASURES.values()), qrels, run):
        sums[metric.measure] += metric.value
    for field, measure in MEASURES.items():
        expected = sums[measure] / len(queries)
        assert abs(result[field] - expected) <= TOLERANCE, (name, field, result[field], expected)
        seen.add(round(result[field], 6))

assert len(seen) > 8, f"too many figures are alike to say anything: {seen}"
print("done")
