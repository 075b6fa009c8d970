"""The tables of doc/engine.md from what `piebridge engine bench --json` wrote.

Usage: python doc/experiments/engine_report.py res/measured/x86_2_cores_engine
"""

import json
import sys
from pathlib import Path

TIMES = {"step": "step_ms", "eager, full": "eager_full_ms", "eager channels last, full": "eager_full_channels_last_ms",
         "bf16 autocast, full": "eager_full_bf16_ms", "eager channels last, same scheme": "eager_scheme_ms", "full step": "full_step_ms",
         "compiling, s": "compile_seconds"}
BYTES = ("PyTorch, full", "full, with masks", "scheme, trained part", "less, scheme", "less, full", "planned peak, whole step",
         "counted peak")


def read(folder):
    """[(name of the file, its row)], in order of the names."""
    return [(path.stem, json.loads(path.read_text(encoding="utf-8"))[0]) for path in sorted(Path(folder).glob("*.json"))]


def render(folder):
    """Both tables as Markdown."""
    rows = read(folder)
    times = [[name, *(f"{row[key]:.0f}" for key in TIMES.values()), f"{row['eager_full_ms'] / row['step_ms']:.1f}x",
              f"{row['eager_scheme_ms'] / row['step_ms']:.2f}x", f"{_best(row) / row['full_step_ms']:.2f}x", _runs_on(row["choice"])]
             for name, row in rows]
    sizes = [[name, *(f"{row[key]:.1f}" for key in ("pytorch_full_extra_mib", "masked_full_extra_mib", "sparse_extra_mib")),
              f"{row['pytorch_full_extra_mib'] / row['sparse_extra_mib']:.1f}x",
              f"{row['pytorch_full_extra_mib'] / row['masked_full_extra_mib']:.1f}x",
              f"{row['planned_peak_mib']:.2f}", f"{row['measured_peak_mib']:.2f}"] for name, row in rows]
    head = ["", *TIMES, "eager full / step", "same scheme / step", "best eager / full step", "step runs on"]
    return "\n".join(_table(head, times) + [""] + _table(["MiB", *BYTES], sizes))


def _best(row):
    return min(row[key] for key in ("eager_full_ms", "eager_full_channels_last_ms", "eager_full_bf16_ms"))


def _runs_on(choice):
    return ", ".join(f"{part}: {name}" for part, name in choice["parts"].items())


def _table(head, rows):
    return ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)] + ["| " + " | ".join(row) + " |" for row in rows]


if __name__ == "__main__":
    print(render(sys.argv[1]))
