"""The commands do what they say, in process, on a tiny model folder."""

import json
from pathlib import Path

import pytest
from tests.cli.conftest import ANSWERS

from redknot.cli import main
from redknot.heads import HeadMap
from redknot.models import load_model
from redknot.recovery import Plan

PNG = b"\x89PNG\r\n\x1a\n"
POLICIES = "reuse,epic:k=8,question_drop"


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def run_eval(folder: str, data: Path, report: Path, *options: str) -> dict:
    command = ["eval", folder, "--data", str(data), "--policies", POLICIES, "--json", str(report)]
    assert main([*command, "--answer-tokens", "4", *options]) == 0
    return read(report)


def test_a_saved_byte_tokenizer_keeps_its_chat_template_and_anchor(folder: str) -> None:
    tokenizer = load_model(folder).tokenizer
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert rendered == "<|bos|><|user|>x<|end|>"


@pytest.mark.parametrize("of", ["file", "folder"])
def test_generate_answers_over_a_file_or_a_folder_and_writes_figures_and_plan(
    of: str, folder: str, document: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "documents").mkdir()
    source = document
    if of == "folder":
        source = tmp_path / "documents"
        for name in ("a", "b"):
            (source / f"{name}.txt").write_text(document.read_text() + name)
        (source / ".hidden").write_text("not a document")
    answer, plan = tmp_path / "answer.json", tmp_path / "plan.json"
    command = ["generate", folder, "--question", "When?", "--documents", str(source)]
    command += ["--max-tokens", "5", "--no-planned", "--policy", "epic:k=8"]
    assert main([*command, "--json", str(answer), "--save-plan", str(plan)]) == 0
    printed, found = capsys.readouterr().out, read(answer)
    assert found["text"] in printed
    assert 1 <= len(found["token_ids"]) <= 5
    titles = [one["span"]["title"] for one in found["reuse"]["segments"]]
    assert titles == (["bridge"] if of == "file" else ["a", "b"])
    assert {one["status"] for one in found["reuse"]["segments"]} == {"stored"}
    assert found["reuse"]["reused_tokens"] > 0
    assert main(["inspect", "plan", str(plan), str(plan), "--json", str(answer)]) == 0
    shown, loaded = capsys.readouterr().out, Plan.load(plan)
    assert loaded.describe() in shown
    assert "no difference" in shown
    assert read(answer)["rows"] == [len(layer.active) for layer in loaded.layers]


def test_eval_writes_report_rows_and_picture(folder: str, data: Path, tmp_path: Path) -> None:
    rows, picture = tmp_path / "rows.jsonl", tmp_path / "p.png"
    options = ("--rows", str(rows), "--picture", str(picture))
    report = run_eval(folder, data, tmp_path / "r.json", *options)
    assert report["model"] == "tiny"
    assert report["n"] == len(ANSWERS)
    assert report["floor"]["agreement"]["mean"] == 1
    names = ["dense", "reuse", "epic:k=8", "question_drop"]
    assert [one["name"] for one in report["policies"]] == names
    for one in report["policies"]:
        for name in ("kl", "agreement", "gold_nll_change", "f1", "exact_match"):
            assert one[name]["low"] <= one[name]["mean"] <= one[name]["high"]
        assert set(one["first_token"]) == {"top1", "top10"}
        assert 0 < one["flops_share"] <= 1
        assert one["kv_share"] == 1
        times = one["ttft_seconds"]
        assert 0 < times["p10"] <= times["median"] <= times["p90"]
        assert one["ttft_ratio_to_dense"]["mean"] > 0
        assert one["stages"]["recover"] > 0
    dense = report["policies"][0]
    assert dense["kl"]["mean"] == 0
    assert dense["agreement"]["mean"] == 1
    assert dense["ttft_ratio_to_dense"] == {"mean": 1, "low": 1, "high": 1}
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    pairs = {(line["id"], line["policy"]) for line in lines}
    assert pairs == {
        (f"row-{index}", name) for index in range(len(ANSWERS)) for name in (*names, "floor")
    }
    assert picture.read_bytes().startswith(PNG)


def test_eval_without_timing_has_no_times(folder: str, data: Path, tmp_path: Path) -> None:
    report = run_eval(folder, data, tmp_path / "r.json", "--no-timing", "--limit", "2")
    assert report["n"] == 2
    for one in report["policies"]:
        assert {"kl", "exact_match"} <= set(one)
        assert not {"ttft_seconds", "stages", "ttft_ratio_to_dense"} & set(one)


def test_eval_with_timing_only_has_no_fidelity(folder: str, data: Path, tmp_path: Path) -> None:
    report = run_eval(folder, data, tmp_path / "r.json", "--timing-only", "--limit", "2")
    for one in report["policies"]:
        assert {"ttft_seconds", "stages", "ttft_ratio_to_dense"} <= set(one)
        assert not {"kl", "agreement", "f1", "exact_match", "first_token"} & set(one)


def test_profile_writes_a_map_that_fits_a_report_and_two_pictures(
    folder: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, report = tmp_path / "map.json", tmp_path / "report.json"
    pictures = [tmp_path / "heads.png", tmp_path / "tokens.png"]
    command = ["profile", folder, "--data", str(data), "--out", str(out), "--json", str(report)]
    command += ["--prompts", "3", "--quality-prompts", "1", "--min-tokens", "200"]
    command += ["--max-tokens", "6000", "--window", "16", "--windows", "16", "--shares", "0.5"]
    command += ["--picture", str(pictures[0]), "--tokens-picture", str(pictures[1])]
    assert main(command) == 0
    found, model = read(report), load_model(folder)
    head_map = HeadMap.load(out).fit(model.adapter)
    assert [len(layer) for layer in head_map.decode] == [2] * 4
    assert [len(layer) for layer in found["scores"]] == [2] * 4
    assert found["num_prompts"] == head_map.measured.num_prompts == 3
    assert -1 <= found["split_half"] <= 1
    assert {(one["windows"], one["window"]) for one in found["maps"]} == {
        ("context", 16),
        ("decode", 16),
    }
    assert all(picture.read_bytes().startswith(PNG) for picture in pictures)
    capsys.readouterr()
    copy = tmp_path / "copy.json"
    assert main(["inspect", "map", str(out), "--json", str(copy)]) == 0
    shown = capsys.readouterr().out
    assert "prefill: 50% global, local [(16, 4)]" in shown
    assert HeadMap.load(copy) == HeadMap.load(out)
    command = ["eval", folder, "--data", str(data), "--policies", "duo", "--head-map", str(out)]
    assert main([*command, "--no-timing", "--limit", "1", "--json", str(report)]) == 0
    assert read(report)["policies"][1]["kv_share"] < 1


def test_inspect_segment_shows_tokens_bytes_and_key(
    folder: str, document: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "segments.json"
    command = ["inspect", "segment", str(document), "--model", folder, "--json", str(written)]
    assert main(command) == 0
    (found,) = read(written)
    text = f"Document: bridge\n{document.read_text().strip()}\n\n"
    assert found["title"] == "bridge"
    assert found["tokens"] == len(text)
    # two planes of 4 layers, 2 KV heads, 16 float32; the store may keep the token ids too
    assert 0 <= found["bytes"] - len(text) * 2 * 4 * 2 * 16 * 4 <= 8 * len(text)
    assert len(bytes.fromhex(found["key"])) == 32
    assert "bridge" in capsys.readouterr().out


def test_inspect_config_describes_the_model(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "config.json"
    assert main(["inspect", "config", folder, "--json", str(written)]) == 0
    found = read(written)
    assert (found["layers"], found["kv_heads"], found["query_heads"]) == (4, 2, 8)
    assert (found["head_dim"], found["context_length"]) == (16, 8192)
    assert found["state_bytes_per_token"] == 2 * 4 * 2 * 16 * 4
    assert found["anchor"][0] == 256
    assert found["end_tokens"] == [257]
    assert "context_length: 8192" in capsys.readouterr().out
