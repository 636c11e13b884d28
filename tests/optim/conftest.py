"""Makes the modules next to the tests importable, also in processes that a test starts."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
