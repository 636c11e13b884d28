"""The ring of snapshots against a tiny model of it: a list of steps, and for each whether it is healthy."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gradvitals.act.snap_ring import MAX_PENDING, Ring

EVENTS = st.lists(st.sampled_from(["step", "step", "step", "trouble", "restore"]), max_size=200)


@given(EVENTS, st.integers(1, 6), st.integers(0, 15), st.integers(1, 3))
def test_ring_is_its_model(events: list[str], every: int, settle: int, keep: int) -> None:
    ring = Ring(every=every, settle=settle, keep=keep)
    model: list[list[Any]] = []  # [step, is healthy], oldest first
    step, last, best_before = 0, 0, -1
    for event in events:
        if event == "step":
            step += 1
            settled, gone = ring.settle(step)
            now = [one for one in model if not one[1] and one[0] <= step - settle]
            for one in now:
                one[1] = True
            assert [entry.step for entry in settled] == [one[0] for one in now]
            extra = max(0, sum(one[1] for one in model) - keep)
            assert [entry.step for entry in gone] == [one[0] for one in model if one[1]][:extra]
            model = _without_oldest(model, extra)
            waiting = sum(not one[1] for one in model)
            assert ring.due(step) == (step - last >= every and waiting < MAX_PENDING)
            if ring.due(step):
                ring.add(step)
                model.append([step, False])
                last = step
        elif event == "trouble":
            assert [entry.step for entry in ring.spoil()] == [one[0] for one in model if not one[1]]
            model = [one for one in model if one[1]]
        else:
            ring.spoil()
            model = [one for one in model if one[1]]
            newest = ring.newest_healthy()
            if newest is not None:
                step = last = newest.step
                ring.go_on_from(step)
        assert [(entry.step, entry.health == "healthy") for entry in ring.entries] == [tuple(one) for one in model]
        assert len(ring.entries) <= keep + MAX_PENDING
        serials = [entry.serial for entry in ring.entries]
        assert serials == sorted(set(serials))
        newest = ring.newest_healthy()
        best = newest.serial if newest is not None else -1
        assert best >= best_before  # trouble never takes a healthy one away
        best_before = best


def _without_oldest(model: list[list[Any]], number: int) -> list[list[Any]]:
    left = []
    for one in model:
        if one[1] and number:
            number -= 1
        else:
            left.append(one)
    return left
