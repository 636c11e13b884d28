"""Numbers on their way to the host: each arrives at its row, also where other rows come under the same name."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradvitals.measure.packet import Packet, Places, ship


def test_rows_may_change_from_step_to_step() -> None:
    known: dict[str, Places] = {}
    for rows in ([0, 2], [0, 2], [2, 1], [1]):
        packet = Packet()
        packet.add("norm", torch.tensor([10.0 + row for row in rows]), rows)
        arrived = ship([packet])[0].wait(known)["norm"]
        assert arrived.present(3).tolist() == [row in rows for row in range(3)]
        expected = [10.0 + row if row in rows else np.nan for row in range(3)]
        np.testing.assert_array_equal(arrived.by_row(3), expected)


def test_parts_of_one_row_are_summed_whatever_they_came_as() -> None:
    packet = Packet()
    packet.add("norm", torch.tensor([1.0, 2.0], dtype=torch.float64), [0, 1])
    packet.add_each("norm", [torch.tensor(4.0), torch.tensor(8.0)], [1, 3])
    packet.add("loss", torch.tensor(0.5))
    arrived = ship([packet])[0].wait()
    np.testing.assert_array_equal(arrived["norm"].by_row(4), [1.0, 6.0, np.nan, 8.0])
    assert arrived["loss"].values.tolist() == [0.5]


def test_which_rows_came_is_not_to_be_changed() -> None:
    present = Places([0]).present(2)
    with pytest.raises(ValueError, match="read-only"):
        present[1] = True


def test_what_is_on_the_host_is_left_as_it_is_until_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    packet = Packet()
    packet.add("norm", torch.tensor([3.0], dtype=torch.bfloat16), [2])
    packet.add_each("max", [torch.tensor(4.0), torch.tensor(8.0)], [1, 0])
    packet.add_later(lambda: [("norm", [0], np.array([5.0])), ("change", [1], np.array([6.0], dtype=np.float32))])

    def work(*args: object) -> None:
        raise AssertionError("the training thread is not to do this")

    with monkeypatch.context() as training:
        training.setattr(torch, "stack", work)
        training.setattr(torch, "cat", work)
        (shipment,) = ship([packet])
    arrived = shipment.wait()
    np.testing.assert_array_equal(arrived["norm"].by_row(3), [5.0, np.nan, 3.0])
    np.testing.assert_array_equal(arrived["max"].by_row(3), [8.0, 4.0, np.nan])
    assert {name: found.values.dtype for name, found in arrived.items()} == dict.fromkeys(arrived, np.dtype(float))
    assert arrived["change"].values.tolist() == [6.0]


def test_what_is_taken_over_from_another_packet_comes_along() -> None:
    one, other = Packet(), Packet()
    other.add("norm", torch.tensor([3.0]), [2])
    other.add_later(lambda: [("change", [1], np.array([6.0]))])
    one.extend(other)
    assert {name: found.rows.tolist() for name, found in ship([one])[0].wait().items()} == {"norm": [2], "change": [1]}
