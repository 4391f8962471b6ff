"""Checks that the measures agree with `ir-measures` (pip install ir-measures) on generated rankings.

Run from the root of the project: python benches/quality/check_measures.py
The rankings have graded, zero and negative judgements, unjudged documents, tied scores, scores that
differ only in double precision, queries without relevant documents, and empty rankings.
"""

import json
import random
import subprocess
import sys

import ir_measures
from ir_measures import RR, R, nDCG

MEASURES = [nDCG @ 10, R @ 10, R @ 100, RR @ 10]
TOLERANCE = 1e-6


def generate(rng):
    documents = [f"{rng.choice(['d', 'D', 'doc-', 'ä'])}{n}" for n in range(rng.choice([5, 30, 300]))]
    grades = rng.choice([[1], [0, 1], [0, 1, 2, 3], [-1, 0, 1, 2], [0]])
    judged = rng.sample(documents, rng.randint(1, len(documents)))
    ranked = rng.sample(documents, rng.randint(0, len(documents)))
    score = rng.choice(
        [rng.random, lambda: float(rng.randint(0, 4)), lambda: 1.0 + rng.random() * 1e-9, lambda: -rng.random()]
    )
    return {
        "judgements": {document: rng.choice(grades) for document in judged},
        "ranking": [[document, score()] for document in ranked],
    }


def references(queries):
    qrels = [
        ir_measures.Qrel(str(n), document, grade)
        for n, query in enumerate(queries)
        for document, grade in query["judgements"].items()
    ]
    run = [
        ir_measures.ScoredDoc(str(n), document, score)
        for n, query in enumerate(queries)
        for document, score in query["ranking"]
    ]
    values = {(str(n), str(measure)): 0.0 for n in range(len(queries)) for measure in MEASURES}
    for metric in ir_measures.iter_calc(MEASURES, qrels, run):
        values[metric.query_id, str(metric.measure)] = metric.value
    return values


def main():
    rng = random.Random(7)
    queries = [generate(rng) for _ in range(2000)]
    lines = "".join(json.dumps(query) + "\n" for query in queries)
    command = ["cargo", "run", "--quiet", "--package", "ragstone-core", "--example", "measure"]
    output = subprocess.run(command, input=lines, capture_output=True, text=True, check=True).stdout
    ours = [json.loads(line) for line in output.splitlines()]
    assert len(ours) == len(queries), f"{len(ours)} answers to {len(queries)} queries"
    expected = references(queries)
    worst = 0.0
    for n, figures in enumerate(ours):
        for name, value in figures.items():
            difference = abs(value - expected[str(n), name])
            worst = max(worst, difference)
            if difference > TOLERANCE:
                print(f"query {n}, {name}: {value}, the reference has {expected[str(n), name]}")
    print(f"{len(queries)} queries, {len(MEASURES)} measures, greatest difference {worst:.2e}")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
