"""lm-eval scores texts and has them written by a server, which tells it the tokens too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_runtime import Engine
from dflash_runtime.engine.demo_model import demo_model_path
from support.clients import VENV, program_of, run
from support.serving import RunningServer

pytestmark = pytest.mark.e2e

DOCUMENTS = [
    {"q": "def add(a, b):\n    return", "choices": [" a + b", " None"]},
    {"q": "import", "choices": [" os", " 12"]},
]


def write_tasks(folder: Path) -> None:
    data = folder / "documents.jsonl"
    data.write_text("\n".join(map(json.dumps, DOCUMENTS)))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{q}}",
    }
    tasks: list[dict[str, Any]] = [
        {
            "task": "written",
            "output_type": "generate_until",
            "doc_to_target": "{{choices[0]}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
            "metric_list": [{"metric": "exact_match"}],
        },
        {
            "task": "chosen",
            "output_type": "multiple_choice",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": 0,
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}],
        },
        {
            "task": "rolling",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{q}}{{choices[0]}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
    ]
    for task in tasks:
        (folder / f"{task['task']}.yaml").write_text(json.dumps({**common, **task}))


def test_lm_eval_writes_and_scores(server: RunningServer, tmp_path: Path) -> None:
    write_tasks(tmp_path)
    model = {"model": "dflash-demo", "base_url": f"{server.url}/v1/completions"}
    run(
        [
            program_of(VENV / "bin" / "lm_eval"),
            *("--model", "local-completions"),
            *("--model_args", ",".join(f"{name}={value}" for name, value in model.items())),
            *("--tasks", "written,chosen,rolling", "--include_path", str(tmp_path)),
            *("--output_path", str(tmp_path / "out"), "--log_samples"),
        ],
        tmp_path,
        HF_HOME=str(tmp_path),
    )

    def samples(task: str) -> list[dict[str, Any]]:
        [path] = (tmp_path / "out").rglob(f"samples_{task}_*.jsonl")
        found = [json.loads(line) for line in path.read_text().splitlines()]
        return sorted(found, key=lambda each: each["doc_id"])

    assert all("\n" not in each["resps"][0][0] for each in samples("written"))
    assert len(samples("rolling")) == len(DOCUMENTS)
    with Engine.open(demo_model_path()) as engine:
        for document, sample in zip(DOCUMENTS, samples("chosen"), strict=True):
            context = str(document["q"])
            for choice, [answer] in zip(document["choices"], sample["resps"], strict=True):
                ids = engine.encode_prompt(context + choice)
                first = len(engine.encode_prompt(context))
                logits = engine.logits(ids).astype(np.float64)
                logits -= logits.max(axis=1, keepdims=True)
                logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
                wanted = sum(logits[place - 1, ids[place]] for place in range(first, len(ids)))
                assert float(answer[0]) == pytest.approx(wanted, abs=1e-6)
