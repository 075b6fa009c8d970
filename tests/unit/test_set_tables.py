"""What a set's manifest is shown as: the profile's text, the set's tables, the documents' section and figure."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from piebridge.core import proxy_set
from piebridge.core.capture import capture
from piebridge.core.errors import UserError
from piebridge.forge.latency import original_level
from piebridge.forge.profiling import judgement, not_worth, profile_set, render_latency
from piebridge.forge.set_facts import LevelFacts, check_facts, fastest, level_facts, points_of, read_facts
from piebridge.forge.show_set import render_set
from piebridge.forge.text_table import markdown_table, text_table

ROOT = Path(__file__).resolve().parents[2]


def cell(median, iqr=0.01, repeats=25):
    return {"median": median, "iqr": iqr, "repeats": repeats}


def levels_table(times, refused=()):
    """A table of one batch size from {level: {backend: (forward, forward + backward or None)}}."""
    levels = {level: {backend: {"forward_ms": {"4": cell(forward)}, **({"backward_ms": {"4": cell(backward)}} if backward else {})}
                      for backend, (forward, backward) in backends.items()} for level, backends in times.items()}
    return {"device": {"type": "cpu", "name": "A board", "cores": 2, "threads": 2},
            "versions": {"torch": "2.9", "openvino": "2026.1", "onnxruntime": None}, "levels": levels, "refused": list(refused)}


def proxy(name, resolution, precision, macs, error, **facts):
    figures = {key: {"block": {"cosine": 0.0, "relative_error": 9.0}, "pool": {"cosine": 1 - each / 2, "relative_error": each}}
               for key, each in (("before", 2 * error), ("after", error))}
    return {"file": f"proxy_{resolution}.safetensors", "sha256": "0" * 64, "bytes": 2_100_000, "name": name, "resolution": resolution,
            "precision": precision, "macs": macs, "facts": dict(facts, alignment=figures)}


TABLE = levels_table({
    "original": {"eager": (10.0, 30.0), "openvino": (4.0, None)}, "192px": {"eager": (7.5, 22.0), "openvino": (3.0, None)},
    "p076-191px-int8": {"openvino_int8": (2.0, None)}, "160px": {"eager": (6.0, 15.0), "openvino": (2.001, None)}})


@pytest.fixture
def manifest():
    return {"format": "piebridge-proxy-set", "version": 1, "order": None, "policy": None, "predictor": None,
            "original": {"file": "original.safetensors", "sha256": "0" * 64, "bytes": 19_000_000, "name": "tower", "macs": 400_000_000},
            "proxies": [proxy("192px", 192, "float", 294_000_000, 0.2),
                        proxy("p076-191px-int8", 191, "int8", 223_000_000, 0.25, width=0.76, dropped=["b.1", "b.2"]),
                        proxy("160px", 160, "float", 204_000_000, 0.3)],
            "facts": {"tap": "pool", "resolution": 224, "images": {"fitted": 500, "held_out": 77},
                      "settings": {"levels": 3, "precisions": ["float", "int8"], "resolutions": ["192", "160"], "overwrite": True}},
            "latency": {"A board": TABLE}}


def test_levels_of_a_manifest(manifest):
    levels = level_facts(manifest)
    assert [level.name for level in levels] == ["original", "192px", "p076-191px-int8", "160px"]
    assert [level.error for level in levels] == [0.0, 0.2, 0.25, 0.3]
    assert [level.text for level in levels] == ["224 px", "192 px", "191 px, int8, pruned to 76 %, 2 blocks dropped", "160 px"]
    assert levels[2].before == {"cosine": 0.75, "relative_error": 0.5}
    del manifest["facts"]["tap"], manifest["proxies"][0]["facts"]["alignment"]["after"]
    assert [level.error for level in level_facts(manifest)] == [0.0, 0.4, 0.25, 0.3]  # the last tap listed is the head's
    manifest["proxies"][2]["facts"] = {}
    assert level_facts(manifest)[3] == LevelFacts("160px", 160, "float", 204_000_000) and level_facts(manifest)[3].error is None


@pytest.mark.parametrize("path, value, message", [
    (("facts", "tap"), [], "facts tap=.* must be a text, or null"),
    (("facts", "resolution"), -1, "facts resolution=-1 must be a whole number above 0, or null"),
    (("proxies", 1, "facts", "width"), "narrow", "proxy 1: facts width='narrow' must be a number, or null"),
    (("proxies", 0, "facts", "dropped"), 3, "proxy 0: facts dropped=3 must be a list of texts"),
    (("proxies", 0, "facts", "alignment"), "good", "proxy 0: facts alignment='good' must be an object"),
    (("proxies", 0, "facts", "alignment", "after"), [1], "alignment after=.* must be an object"),
    (("proxies", 0, "facts", "alignment", "after", "pool"), None, "alignment after pool=None must be an object"),
    (("proxies", 0, "facts", "alignment", "after", "pool", "cosine"), None, "after pool cosine=None must be a number"),
    (("latency", "A board"), None, "latency A board=None must be an object"),
    (("latency", "A board", "levels"), [], "latency A board levels=.* must be an object"),
    (("latency", "A board", "device", "threads"), 0, "device threads=0 must be a whole number above 0"),
    (("latency", "A board", "levels", "192px", "eager"), 7.5, "levels 192px eager=7.5 must be an object"),
    (("latency", "A board", "levels", "192px", "eager", "forward_ms", "four"), {}, "forward_ms four='four' must be a batch size"),
    (("latency", "A board", "levels", "192px", "eager", "forward_ms", "4", "median"), 0, "median=0 must be a number above 0"),
    (("latency", "A board", "levels", "192px", "eager", "forward_ms", "4"), {}, "median=None must be a number above 0"),
])
def test_a_manifest_whose_facts_lie(manifest, tmp_path, path, value, message):
    manifest = json.loads(json.dumps(manifest))
    check_facts(tmp_path, manifest)
    entry = manifest
    for key in path[:-1]:
        entry = entry[key]
    entry[path[-1]] = value
    manifest["proxies"] = [dict(each, file=f"proxy_{number:02d}.safetensors") for number, each in enumerate(manifest["proxies"], 1)]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=message) as caught:
        read_facts(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "manifest.json")) and len(str(caught.value).splitlines()) == 1


def test_each_level_counts_on_its_fastest_backend():
    assert fastest(TABLE, "original", "forward_ms", 4) == ("openvino", cell(4.0))
    assert fastest(TABLE, "original", "backward_ms", 4) == ("eager", cell(30.0))
    assert fastest(TABLE, "p076-191px-int8", "backward_ms", 4) is None and fastest(TABLE, "original", "forward_ms", 1) is None
    points = points_of(TABLE, {"original": 0.0, "192px": 0.2, "160px": None}, "forward_ms", 4)
    assert [tuple(point)[:3] for point in points] == [("original", 4.0, 0.0), ("192px", 3.0, 0.2)]


ERRORS = {"original": 0.0, "a": 0.1, "b": 0.2, "c": 0.3}


@pytest.mark.parametrize("times, expected", [
    ({"a": (4.0, 9.0), "b": (3.0, 8.0), "c": (2.0, 7.0)}, {}),
    ({"a": (4.0, 9.0), "b": (4.5, 9.5), "c": (2.0, 7.0)}, {
        "b": "b is not worth having here: a is better aligned (relative error 0.1 against 0.2) and is faster (forward, batch 4: 4 ms "
             "against 4.5 ms per image)"}),
    ({"a": (4.0, 9.0), "b": (3.999, 9.0), "c": (2.0, 7.0)}, {
        "b": "b is not worth having here: a is better aligned (relative error 0.1 against 0.2) and takes no longer but for noise "
             "(forward, batch 4: 4 ms against 4 ms per image)"}),
    ({"a": (4.0, 9.0), "b": (4.5, 8.0), "c": (2.0, 7.0)}, {}),  # of use where there is a backward
    ({"a": (4.0, 9.0), "b": (4.5, None), "c": (4.6, 9.5)}, {"b": "", "c": ""}),
    ({"a": (5.0, 9.0), "b": (3.0, 8.0), "c": (2.0, 7.0)}, {"a": "a is not worth having here: original is better aligned"}),
])
def test_levels_that_are_not_worth_having(times, expected):
    table = levels_table({name: {"eager": pair} for name, pair in dict({"original": (5.0, 10.0)}, **times).items()})
    if times["a"] == (5.0, 9.0):
        table["levels"]["a"]["eager"].pop("backward_ms")
    found = not_worth(table, ERRORS)
    assert sorted(found) == sorted(expected)
    assert all(found[name].startswith(sentence) for name, sentence in expected.items())


def test_levels_for_a_backward_alone_are_told_apart():
    table = levels_table({"original": {"eager": (5.0, 10.0)}, "a": {"openvino_int8": (2.0, None)}, "b": {"eager": (4.0, 8.0)},
                          "c": {"eager": (3.9, 9.0)}})
    sentences = judgement(table, ERRORS)
    assert [sentence[:27] for sentence in sentences] == ["c is not worth having here:", "Worth having only where a b"]
    assert sentences[1] == "Worth having only where a backward runs through them: b."


def test_of_two_equal_levels_one_stays():
    table = levels_table({name: {"eager": (4.0, None)} for name in ("original", "a", "b")})
    table["levels"]["original"]["eager"]["forward_ms"]["4"] = cell(9.0)
    assert list(not_worth(table, {"original": 0.0, "a": 0.1, "b": 0.1})) == ["b"]
    assert "a is as well aligned (relative error 0.1)" in not_worth(table, {"original": 0.0, "a": 0.1, "b": 0.1})["b"]
    assert not_worth(table, {"original": 0.0, "a": None}) == {}


def test_the_text_of_a_profile():
    refusal = {"level": "160px", "backend": "onnxruntime", "direction": "forward_ms", "reason": "no kernel"}
    table = dict(TABLE, refused=[dict(refusal, batch_size=size) for size in (1, 4)])
    text = render_latency(table, {"original": 0.0, "192px": 0.2, "p076-191px-int8": 0.25, "160px": 0.3})
    assert "A board: cpu, 2 cores, 2 threads; torch 2.9, openvino 2026.1\n" in text
    assert "median +- interquartile range of 25 to 25 calls" in text
    assert ("original             4 +- 0.01 (100 %)  openvino\n192px                3 +- 0.01 ( 75 %)  openvino\n"
            "p076-191px-int8      2 +- 0.01 ( 50 %)  openvino_int8\n160px            2.001 +- 0.01 ( 50 %)  openvino\n") in text
    assert "backend   forward, batch 4  forward + backward, batch 4\neager           10 +- 0.01                   30 +- 0.01\n" in text
    assert text.splitlines()[-2:] == ["Refused: 160px on onnxruntime: no kernel",
                                      "Worth having only where a backward runs through them: 160px."]


def test_the_text_of_a_set(manifest):
    text = render_set(manifest)
    assert text.startswith("tower: 3 proxies\n")
    lines = text.splitlines()
    row = next(line for line in lines if line.startswith("2  p076"))
    assert " ".join(row.split()) == ("2 p076-191px-int8 191 px, int8, pruned to 76 %, 2 blocks dropped 223.0 M 56 % "
                                     "0.750 0.875 0.500 0.250")
    assert "A board, 2 threads, batch 4: milliseconds per image, medians" in lines
    device = lines[lines.index("A board, 2 threads, batch 4: milliseconds per image, medians") + 1:]
    assert [line.split() for line in device] == [
        ["level", "eager", "openvino", "openvino_int8", "fastest", "share", "with", "backward", "share"],
        ["original", "10", "4", "-", "4", "100", "%", "30", "100", "%"], ["192px", "7.5", "3", "-", "3", "75", "%", "22", "73", "%"],
        ["p076-191px-int8", "-", "-", "2", "2", "50", "%", "-", "-"], ["160px", "6", "2.001", "-", "2.001", "50", "%", "15", "50", "%"]]
    manifest["latency"] = {}
    assert render_set(manifest).endswith("Not measured on any device yet: piebridge forge --profile SET")


def test_tables_are_aligned_and_escaped():
    rows = [("name", "ms"), ("a|b", "1.5"), ("c", "10")]
    assert text_table(rows, "left right") == "name   ms\na|b   1.5\nc      10"
    assert markdown_table(rows, "left right") == "| name | ms |\n| --- | ---: |\n| a\\|b | 1.5 |\n| c | 10 |"


@pytest.fixture(scope="module")
def forge_report():
    specification = importlib.util.spec_from_file_location("forge_report", ROOT / "doc" / "experiments" / "forge_report.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_report_is_the_same_each_time_and_keeps_the_rest_of_the_document(forge_report, manifest, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "lite").mkdir()
    (tmp_path / "lite" / "manifest.json").write_text(json.dumps(manifest))
    document = tmp_path / "proxies.md"
    document.write_text("# Proxies\n\nBefore.\n\n<!-- forge_report lite -->\nold\n<!-- end of forge_report lite -->\n\nAfter.\n")
    assert forge_report.report(tmp_path / "lite", document) == (document, tmp_path / "proxies_lite.svg")
    text, figure = document.read_text(), (tmp_path / "proxies_lite.svg").read_bytes()
    assert text.startswith("# Proxies\n\nBefore.\n\n<!-- forge_report lite -->\nMade by `python doc/experiments/forge_report.py ")
    assert text.endswith("<!-- end of forge_report lite -->\n\nAfter.\n") and "old" not in text
    assert "| 2 | p076-191px-int8 | 191 px, int8, pruned to 76 %, 2 blocks dropped | 223.0 M | 56 % | 0.750 | 0.875 | 0.500 |" in text
    assert "| p076-191px-int8 | - | - | 2 | 2 | 50 % | - | - |" in text and "(proxies_lite.svg)" in text
    assert "`piebridge forge tower --images DIR --out proxynetworks/lite levels=3 resolutions=192,160`." in text
    assert "On disk: 19.0 MB the original, 6.3 MB what all proxies together have beside it." in text
    assert "means over 77 held-out images" in text
    assert "medians of 25 interleaved calls, with interquartile ranges of up to 0 %, half of them up to 0 %." in text
    assert len(figure) < 60_000 and all(name.encode() in figure for name in ("p076-191px-int8", "A board: forward + backward, batch 4"))
    forge_report.report(tmp_path / "lite", document)
    assert document.read_text() == text and (tmp_path / "proxies_lite.svg").read_bytes() == figure
    document.write_text("# Others\n")
    forge_report.report(tmp_path / "lite", document)
    assert document.read_text().startswith("# Others\n\n<!-- forge_report lite -->\n")


def test_nothing_to_report(forge_report, manifest, tmp_path):
    manifest["latency"] = {}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="not measured on any device yet; run: piebridge forge --profile"):
        forge_report.report(tmp_path, tmp_path / "proxies.md")
    with pytest.raises(SystemExit, match="no such file"):
        forge_report.main([str(tmp_path / "nowhere")])
    assert not (tmp_path / "proxies.md").exists()


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(8, 5)

    def forward(self, x):
        return self.classifier(torch.flatten(self.pool(self.stem(x)), 1))


@pytest.fixture
def original():
    torch.manual_seed(0)
    return capture(Tower().eval(), "tower", [3, 16, 16], [0.5] * 3, [0.5] * 3)


def test_a_set_is_profiled_and_the_table_kept(original, tmp_path):
    facts = {"alignment": {"after": {"pool": {"cosine": 0.9, "relative_error": 0.3}}}}
    level = proxy_set.Proxy("8px", original, 8, facts=facts)
    proxy_set.write_proxy_set(tmp_path / "set", original, [level])
    text = profile_set(tmp_path / "set", seconds=0.01, batch_sizes=(1, 2), device="cpu", backends=["eager"])
    manifest = proxy_set.load_proxy_set(tmp_path / "set").manifest
    ((device, table),) = manifest["latency"].items()
    assert table["device"]["name"] == device and list(table["levels"]) == ["original", "8px"]
    assert list(table["levels"]["8px"]["eager"]["backward_ms"]) == ["1", "2"]
    assert text == render_latency(table, {"original": 0.0, "8px": 0.3})
    assert device in render_set(manifest)


def test_a_set_without_proxies_is_not_profiled(original, tmp_path):
    proxy_set.write_proxy_set(tmp_path / "set", original, [])
    with pytest.raises(UserError, match="holds no proxies, only an original; make some with: piebridge forge NETWORK"):
        profile_set(tmp_path / "set")
    with pytest.raises(UserError, match="no such file; give the folder of a proxy set"):
        profile_set(tmp_path / "nowhere")
    assert original_level(original).resolution == 16
