"""Makes the runs of `by_hand` and `made_up` importable for the tests beside them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
