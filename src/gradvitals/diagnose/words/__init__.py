"""The words of every rule, one file for each family of symptoms."""

from __future__ import annotations

from gradvitals.diagnose.explain import Words
from gradvitals.diagnose.words.batch import WORDS as BATCH
from gradvitals.diagnose.words.clipping import WORDS as CLIPPING
from gradvitals.diagnose.words.gradients import WORDS as GRADIENTS
from gradvitals.diagnose.words.loop import WORDS as LOOP
from gradvitals.diagnose.words.loss import WORDS as LOSS
from gradvitals.diagnose.words.precision import WORDS as PRECISION
from gradvitals.diagnose.words.ranks import WORDS as RANKS
from gradvitals.diagnose.words.scale import WORDS as SCALE
from gradvitals.diagnose.words.schedule import WORDS as SCHEDULE
from gradvitals.diagnose.words.signal import WORDS as SIGNAL
from gradvitals.diagnose.words.swings import WORDS as SWINGS
from gradvitals.diagnose.words.updates import WORDS as UPDATES

WORDS: dict[str, Words] = {
    **LOOP,
    **LOSS,
    **GRADIENTS,
    **SWINGS,
    **UPDATES,
    **SIGNAL,
    **BATCH,
    **SCALE,
    **SCHEDULE,
    **CLIPPING,
    **PRECISION,
    **RANKS,
}
"""By rule id."""
