"""Rows for `redknot eval` from the judge model's prompt generator: names, values and prose unseen.

    python benchmarks/judge_rows.py GENERATOR_FOLDER BOOKS_FOLDER OUT.jsonl [--per-task N]

GENERATOR_FOLDER holds the judge model's `generator.py`; BOOKS_FOLDER holds `alice.txt`. Tasks are
those that separate methods: which document, two and three hops, lists of values, reverse look-ups
and quoting, in the wordings that the model was trained on.
"""

import argparse
import json
import os
import random
import sys
from pathlib import Path

from transformers import AutoTokenizer

from redknot.models.embedded import embedded_gguf

TASKS = ("which_doc", "hop2", "hop3", "multivalue", "reverse", "quote")
LENGTHS = (2048, 2048, 2048, 3072, 4096)


def rows(generator: Path, books: Path, per_task: int, seed: int) -> list[dict[str, object]]:
    """``per_task`` rows of each task, shuffled."""
    os.environ["JUDGE_PHRASING"] = "train"
    sys.path.insert(0, str(generator))
    import generator as gen  # the judge's own code, outside this project

    gguf = embedded_gguf()
    fast = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer = fast.backend_tokenizer
    prose = gen.load_books(str(books), gen.EVAL_BOOKS)
    found = []
    for task in TASKS:
        made = attempt = 0
        while made < per_task:
            attempt += 1
            source = gen.Gen(prose, tokenizer, f"{seed} {task} {attempt}", "eval")
            sample = source.sample(LENGTHS[made % len(LENGTHS)], nq=1, want=task)
            if not sample or len(sample["qas"][0][2]) > 40:
                continue
            _, _, _, answer, question = sample["qas"][0]
            documents = [_document(tokenizer.decode(ids)) for ids in sample["docs"]]
            found.append(
                {
                    "id": f"judge-{task}-{made}",
                    "dataset": f"judge_{task}",
                    "question": question,
                    "answers": [answer],
                    "documents": documents,
                }
            )
            made += 1
    random.Random(seed).shuffle(found)
    return found


def _document(text: str) -> dict[str, str]:
    title, _, body = text.removeprefix("Document: ").partition("\n")
    return {"title": title, "text": body.strip()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("generator", type=Path)
    parser.add_argument("books", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--per-task", type=int, default=20)
    parser.add_argument("--seed", type=int, default=88)
    arguments = parser.parse_args()
    made = rows(arguments.generator, arguments.books, arguments.per_task, arguments.seed)
    arguments.out.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
