"""`gradvitals run` from beginning to end: the script is started, watched, and its verdict said."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from gradvitals.integrations.zero_code.arrival import when_imported
from gradvitals.integrations.zero_code.program import Program
from gradvitals.integrations.zero_code.settings import Settings
from gradvitals.integrations.zero_code.traces import leave_out_ours

if TYPE_CHECKING:
    from gradvitals.integrations.zero_code.hooks import Hooks
    from gradvitals.integrations.zero_code.watcher import Watcher


class Launch:
    """A program that is about to be run.

    Args:
        program: The script or module. It is loaded now, so that one that is not there is an error of ours.
        settings: How to watch it.
    """

    def __init__(self, program: Program, settings: Settings) -> None:
        self._settings = settings
        self._watcher: Watcher | None = None
        self._hooks: Hooks | None = None
        self._process = os.getpid()
        self._start: Callable[[], None] = program.load()

    def __call__(self) -> None:
        """Run it. What it raises is raised, with a traceback as if we were not there."""
        when_imported("torch", self._listen)
        error: BaseException | None = None
        try:
            self._start()
        except BaseException as raised:
            error = raised
            leave_out_ours()
            raise
        finally:
            if os.getpid() == self._process:  # what a script has forked ends here too
                self._end(error)

    def _listen(self) -> None:
        try:
            from gradvitals.integrations.zero_code.hooks import Hooks
            from gradvitals.integrations.zero_code.watcher import Watcher

            self._watcher = Watcher(self._settings)
            self._hooks = Hooks(self._watcher)
            self._hooks.install()
        except Exception as error:
            self._say(f"the script is not watched: {error!r}")

    def _end(self, error: BaseException | None) -> None:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            error = None
        try:
            if self._watcher is not None and self._hooks is not None:
                self._hooks.remove()
                self._watcher.close(error)
            for line in self._last_words():
                self._say(line)
        except Exception as failure:
            self._say(f"the run could not be judged: {failure!r}")

    def _last_words(self) -> Iterable[str]:
        watcher, is_first = self._watcher, int(os.environ.get("RANK", "0")) == 0
        runs = {} if watcher is None else watcher.runs
        if not is_first:  # it may be on another machine than the run
            runs = {path: model for path, model in runs.items() if path.exists()}
        if runs:
            from gradvitals.report.verdict import closing_lines

            return closing_lines(runs)
        if not is_first or (watcher is not None and watcher.is_explained):
            return ()
        return ["no optimizer stepped in this process, so there is nothing to judge"]

    def _say(self, line: str) -> None:
        if not self._settings.quiet:
            print(f"gradvitals: {line}", file=sys.stderr)
