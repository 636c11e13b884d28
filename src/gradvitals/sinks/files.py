"""Files: an event file for TensorBoard, and lines of JSON for scripts and `tail -f`."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from gradvitals.sinks.sink import Sink, require
from gradvitals.types import Action, Finding, json_ready

FLUSH_SECONDS = 10


class TensorBoard(Sink):
    """Writes an event file that TensorBoard reads. Findings and actions are on its Text page.

    Args:
        folder: Folder of the event file, as ``tensorboard --logdir`` wants it; made if needed.
        prefix: Put before every tag, for a folder that has other events too.
    """

    in_worker = True

    def __init__(self, folder: str | Path, *, prefix: str = "") -> None:
        require("tensorboard", "tensorboard")
        self.folder = Path(folder)
        self._prefix = prefix
        self._writer: Any = None

    def __repr__(self) -> str:
        return f"TensorBoard({str(self.folder)!r})"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One event with a scalar for each metric."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=self._tag(key), simple_value=value) for key, value in metrics.items()]
        self._add(Summary(value=values), step)

    def finding(self, finding: Finding) -> None:
        """The finding in words, at the step that it is news of."""
        resolved = "" if finding.last_step is None else f"Resolved after step {finding.last_step}: "
        fixes = "".join(f"\n- {fix}" for fix in finding.fixes)
        step = finding.last_step if finding.last_step is not None else finding.found_step or finding.first_step
        self._text(f"findings/{finding.id}", f"{resolved}{finding}\n{fixes}", step)

    def action(self, action: Action) -> None:
        """The action in words."""
        self._text(f"actions/{action.kind}", str(action), action.step)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()

    def _text(self, tag: str, text: str, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        content = TensorProto(dtype="DT_STRING", string_val=[text.encode("utf-8", "replace")], tensor_shape=shape)
        kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        self._add(Summary(value=[Summary.Value(tag=self._tag(tag), metadata=kind, tensor=content)]), step)

    def _add(self, summary: Any, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        if self._writer is None:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._writer = EventFileWriter(str(self.folder), flush_secs=FLUSH_SECONDS, filename_suffix=".gradvitals")
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def _tag(self, key: str) -> str:
        return self._prefix + re.sub(r"[^-/\w.]", "_", key)


# -- JSONL -----------------------------------------------------------------------------------------------------------


class JSONL(Sink):
    """Appends to a file. Numbers that JSON cannot hold are the strings "nan", "inf" and "-inf".

    Args:
        path: The file; its folder is made if needed.

    Lines are ``{"step": 3, "time": 1700000000.0, "metrics": {"loss": 0.5, ...}}``, ``{"finding": {...}, "time": ...}``
    and ``{"action": {...}, "time": ...}``.
    """

    in_worker = True

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: IO[str] | None = None

    def __repr__(self) -> str:
        return f"JSONL({str(self.path)!r})"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One line for a step."""
        self._write({"step": step, "metrics": metrics})

    def finding(self, finding: Finding) -> None:
        """One line for a finding, each time it changes."""
        self._write({"finding": finding.to_json()})

    def action(self, action: Action) -> None:
        """One line for an action."""
        self._write({"action": action.to_json()})

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8", buffering=1)
        line = json.dumps(json_ready({**record, "time": time.time()}), allow_nan=False, default=str)
        self._file.write(line + "\n")
