"""The engine's test networks lie beside its unit tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "unit" / "engine"))
