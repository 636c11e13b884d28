"""The numbers of an audit, from digests and prints with a fault put in by hand."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from gradvitals.distributed.audit import Memory, Seen, Suspect, audit_numbers, tensor_mismatch

RNG = np.random.default_rng(0)


def prints(*shape: int) -> np.ndarray:
    return RNG.integers(1, 2**64, size=shape, dtype=np.uint64)


def healthy(world: int = 8, *, per_worker: int = 1, classes: int = 2) -> Seen:
    """Each data worker has samples and a gradient of its own; all weights are replicated over all ranks."""
    index = np.arange(world) // per_worker
    workers = int(index[-1]) + 1
    return Seen(
        norms=np.exp(0.05 * RNG.standard_normal(workers)),
        data_index=index,
        rng_prints=np.repeat(prints(1), world),
        sample_prints=prints(workers, 16)[index],
        grad_prints=prints(workers),
        param_digest=np.repeat(prints(classes, 1), world, axis=1),
        state_digest=np.repeat(prints(classes, 1), world, axis=1),
        replica_set=np.zeros((classes, world), dtype=np.int64),
    )


def changed(array: np.ndarray, place: object, value: object) -> np.ndarray:
    array = array.copy()
    array[place] = value
    return array


@pytest.mark.parametrize("world", [2, 3, 64])
@pytest.mark.parametrize("per_worker", [1, 2])
def test_a_healthy_audit(world: int, per_worker: int) -> None:
    world *= per_worker
    memory = Memory()
    for _ in range(3):
        verdict = audit_numbers(healthy(world, per_worker=per_worker), memory)
        assert verdict.values["ranks/duplicates"] == verdict.values["ranks/out_of_step"] == 0
        assert verdict.values["ranks/checksum_mismatch"] == 0
        assert 0 < verdict.values["ranks/norm_dispersion"] < 0.2
        assert verdict.suspects == ()
        assert set(verdict.ranks["ranks/twin"]) == {-1.0}
        assert not verdict.ranks["ranks/replica"].any()
        assert not verdict.ranks["ranks/rng"].any()
        assert not verdict.ranks["ranks/out_of_step"].any()
        assert all(len(array) == world and array.dtype == np.float64 for array in verdict.ranks.values())


def test_norms_go_to_all_ranks_of_a_worker() -> None:
    seen = replace(healthy(8, per_worker=2), norms=np.array([1.0, 1.0, 3.0, 1.0]))
    ranks = audit_numbers(seen, Memory()).ranks
    assert ranks["ranks/norm"].tolist() == [1, 1, 1, 1, 3, 3, 1, 1]
    np.testing.assert_allclose(ranks["ranks/norm_ratio"], [1, 1, 1, 1, 3, 3, 1, 1])
    assert (np.flatnonzero(ranks["ranks/norm_z"] > 5) == [4, 5]).all()
    unknown = replace(seen, data_index=changed(seen.data_index, 7, -1))
    assert np.flatnonzero(np.isnan(audit_numbers(unknown, Memory()).ranks["ranks/norm"])).tolist() == [7]


def test_what_was_not_sent_is_not_said() -> None:
    seen = healthy(4)
    nothing = replace(
        seen,
        norms=np.full(4, np.nan),
        rng_prints=np.zeros_like(seen.rng_prints),
        sample_prints=np.zeros_like(seen.sample_prints),
        grad_prints=np.zeros_like(seen.grad_prints),
        param_digest=seen.param_digest[:0],
        state_digest=seen.state_digest[:0],
        replica_set=seen.replica_set[:0],
    )
    verdict = audit_numbers(nothing, Memory())
    assert (verdict.values, verdict.ranks, verdict.suspects) == ({}, {}, ())


# -- doubles ------------------------------------------------------------------------------------------------------


def test_two_workers_with_one_gradient() -> None:
    seen = healthy(8)
    verdict = audit_numbers(replace(seen, grad_prints=changed(seen.grad_prints, 6, seen.grad_prints[2])), Memory())
    assert verdict.values["ranks/duplicates"] == 2
    assert verdict.ranks["ranks/twin"].tolist() == [-1, -1, 6, -1, -1, -1, 2, -1]


@pytest.mark.parametrize("common", [16, 9, 8])
def test_two_workers_with_the_same_samples_in_any_order(common: int) -> None:
    seen = healthy(8, per_worker=2)
    samples = seen.sample_prints.copy()
    samples[6:] = np.append(samples[0][:common], prints(16 - common))[::-1]
    verdict = audit_numbers(replace(seen, sample_prints=samples), Memory())
    assert verdict.values["ranks/duplicates"] == 2
    assert verdict.ranks["ranks/twin"].tolist() == [6, 6, -1, -1, -1, -1, 0, 0]


def test_a_few_samples_in_common_are_chance() -> None:
    seen = healthy(4)
    samples = seen.sample_prints.copy()
    samples[3, :5] = samples[1, :5]
    assert audit_numbers(replace(seen, sample_prints=samples), Memory()).values["ranks/duplicates"] == 0


def test_all_workers_with_the_same_samples() -> None:
    seen = healthy(5)
    same = np.repeat(seen.sample_prints[:1], 5, axis=0)
    verdict = audit_numbers(replace(seen, sample_prints=same), Memory())
    assert verdict.values["ranks/duplicates"] == 5
    assert verdict.ranks["ranks/twin"].tolist() == [1, 0, 0, 0, 0]


def test_a_batch_of_one_sample_can_be_a_double() -> None:
    seen = healthy(4)
    samples = np.zeros((4, 16), dtype=np.uint64)
    samples[:, 0] = [5, 6, 5, 7]
    assert audit_numbers(replace(seen, sample_prints=samples), Memory()).ranks["ranks/twin"].tolist() == [2, -1, 0, -1]


def test_inputs_that_say_nothing_about_the_data_make_no_doubles() -> None:
    seen = replace(healthy(4), grad_prints=np.zeros(4, dtype=np.uint64))
    mask = np.full_like(seen.sample_prints, 77)  # the same for all samples
    assert "ranks/duplicates" not in audit_numbers(replace(seen, sample_prints=mask), Memory()).values
    grid = replace(seen, sample_prints=np.repeat(prints(1, 16), 4, axis=0))  # the same at every step
    memory = Memory()
    assert audit_numbers(grid, memory).values["ranks/duplicates"] == 4  # not known yet
    for _ in range(3):
        assert "ranks/duplicates" not in audit_numbers(grid, memory).values


# -- out of step --------------------------------------------------------------------------------------------------


def test_random_numbers_that_leave_the_others() -> None:
    memory = Memory()
    seen = healthy(4)
    astray = replace(seen, rng_prints=changed(seen.rng_prints, 2, 99))
    assert audit_numbers(astray, memory).values["ranks/out_of_step"] == 0  # they may have been seeded so
    audit_numbers(seen, memory)
    for _ in range(2):
        verdict = audit_numbers(astray, memory)
        assert verdict.values["ranks/out_of_step"] == 1
        assert verdict.ranks["ranks/rng"].tolist() == [0, 0, 1, 0]
        assert verdict.ranks["ranks/out_of_step"].tolist() == [0, 0, 1, 0]
    resumed = Memory()
    resumed.load_state_dict(memory.state_dict())
    assert audit_numbers(astray, resumed).values["ranks/out_of_step"] == 1
    assert resumed.samples.tolist() == memory.samples.tolist()


def test_of_two_ranks_both_have_left_the_other() -> None:
    memory = Memory()
    seen = healthy(2)
    audit_numbers(seen, memory)
    verdict = audit_numbers(replace(seen, rng_prints=prints(2)), memory)
    assert verdict.ranks["ranks/out_of_step"].tolist() == [1, 1]


def test_ranks_that_all_go_their_own_ways_are_not_out_of_step() -> None:
    memory = Memory()
    seen = healthy(4)
    audit_numbers(seen, memory)
    assert audit_numbers(replace(seen, rng_prints=prints(4)), memory).values["ranks/out_of_step"] == 0
    groups = replace(seen, rng_prints=np.array([4, 9, 9, 5], dtype=np.uint64))
    verdict = audit_numbers(groups, memory)
    assert verdict.values["ranks/out_of_step"] == 0
    assert verdict.ranks["ranks/rng"].tolist() == [1, 0, 0, 2]


def test_ranks_of_one_worker_must_see_the_same_samples() -> None:
    seen = healthy(6, per_worker=3)
    samples = changed(seen.sample_prints, 4, prints(16))
    verdict = audit_numbers(replace(seen, sample_prints=samples), Memory())
    assert verdict.values["ranks/out_of_step"] == 1
    assert verdict.ranks["ranks/out_of_step"].tolist() == [0, 0, 0, 0, 2, 0]
    pair = healthy(4, per_worker=2)
    samples = changed(pair.sample_prints, 3, prints(16))
    assert audit_numbers(replace(pair, sample_prints=samples), Memory()).ranks["ranks/out_of_step"].tolist() == [
        *(0, 0, 2, 2)
    ]
    silent = changed(pair.sample_prints, 3, 0)  # a later stage, which sees none
    assert not audit_numbers(replace(pair, sample_prints=silent), Memory()).ranks["ranks/out_of_step"].any()


# -- replicas -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["param_digest", "state_digest"])
def test_a_copy_that_differs_names_its_rank(what: str) -> None:
    seen = healthy(4)
    verdict = audit_numbers(replace(seen, **{what: changed(getattr(seen, what), (1, 3), 5)}), Memory())
    assert verdict.suspects == (Suspect(1, 0, (0, 1, 2, 3), (3,)),)
    assert verdict.values["ranks/checksum_mismatch"] == 1
    assert verdict.ranks["ranks/replica"].tolist() == [0, 0, 0, 1]


def test_without_a_majority_all_are_named() -> None:
    seen = healthy(2)
    verdict = audit_numbers(replace(seen, param_digest=changed(seen.param_digest, (0, 1), 5)), Memory())
    assert verdict.suspects == (Suspect(0, 0, (0, 1), (0, 1)),)
    assert verdict.ranks["ranks/replica"].tolist() == [1, 1]


def test_only_members_of_one_set_are_compared() -> None:
    seen = healthy(6, classes=1)
    sets = np.array([[0, 0, 1, 1, 1, -1]])
    digests = np.array([[4, 4, 7, 7, 8, 3]], dtype=np.uint64)
    verdict = audit_numbers(replace(seen, replica_set=sets, param_digest=digests, state_digest=digests), Memory())
    assert verdict.suspects == (Suspect(0, 1, (2, 3, 4), (4,)),)
    np.testing.assert_array_equal(verdict.ranks["ranks/replica"], [0, 0, 0, 0, 1, np.nan])
    alone = replace(seen, replica_set=np.arange(6)[None])  # sharded, no copies at all
    verdict = audit_numbers(alone, Memory())
    assert "ranks/checksum_mismatch" not in verdict.values
    assert "ranks/replica" not in verdict.ranks


def test_state_that_one_rank_keeps_for_all_is_not_compared() -> None:
    seen = healthy(4, classes=1)
    state = np.array([[0, 0, 9, 0]], dtype=np.uint64)
    assert audit_numbers(replace(seen, state_digest=state), Memory()).values["ranks/checksum_mismatch"] == 0


def test_which_tensors_differ() -> None:
    sets = np.array([[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 2, 3], [0, 0, 0, 0]])
    params = np.array([[5, 5, 5, 6], [1, 1, 2, 2], [1, 2, 3, 4], [7, 7, 7, 7]], dtype=np.uint64)
    state = np.array([[5, 5, 5, 6], [1, 1, 2, 3], [1, 2, 3, 4], [0, 0, 7, 0]], dtype=np.uint64)
    assert tensor_mismatch(params, state, sets).tolist() == [1, 1, 0, 0]


def test_ten_thousand_ranks_are_quick() -> None:
    seen = healthy(10_000, per_worker=2, classes=4)
    seen = replace(seen, grad_prints=np.repeat(prints(1), 5000), replica_set=np.arange(10_000)[None] // np.ones((4, 1)))
    seen = replace(seen, replica_set=(seen.replica_set // 8).astype(np.int64))
    start = time.process_time()
    verdict = audit_numbers(seen, Memory())
    assert time.process_time() - start < 3
    assert verdict.values["ranks/duplicates"] == 5000
