"""Import: a run folder out of the history that some other program kept, so that a run never watched can be judged."""

from gradvitals.importing.run import Imported, import_run
from gradvitals.importing.sources import ImportSourceError

__all__ = ["ImportSourceError", "Imported", "import_run"]
