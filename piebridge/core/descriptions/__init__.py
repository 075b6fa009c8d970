"""The graphs of the networks known by name, captured once: a pretrained network is its file here plus its tensors.

Capturing a network takes the library that defines it (torchvision's import alone takes a second) and a trial run; reading takes
neither. `python -m piebridge.core.descriptions` writes the files anew; a test says when they are out of date.
"""

import json
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def read_description(name):
    """The description (dict) of the named architecture, with its 1000 ImageNet classes."""
    return json.loads((FOLDER / (name + ".json")).read_text(encoding="utf-8"))


def write_descriptions():
    """Capture every known architecture and write its description."""
    from piebridge.core.files import write_text
    from piebridge.core.networks import ARCHITECTURES, load_network

    for name in ARCHITECTURES:
        description = load_network(name, is_pretrained=False).description
        nodes = ",\n  ".join(json.dumps(node) for node in description["nodes"])
        rest = json.dumps({key: value for key, value in description.items() if key != "nodes"})
        write_text(FOLDER / (name + ".json"), rest[:-1] + ',\n "nodes": [\n  ' + nodes + "]}\n")
