"""Makes `reference`, the dense truth kept with the tests of measure, importable."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "measure"))
