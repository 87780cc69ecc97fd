import pytest

from harness.errors import CycleError
from harness.simulate.contention import Job, run_jobs


def kernel(
    rank: int,
    *seconds: float,
    after: tuple[int, ...] = (),
    wave_s: float = 0.0,
    release_s: float = 0,
) -> Job:
    return Job((rank * 8,), (rank,), seconds, after, release_s, wave_s)


def transfer(
    src: int,
    dst: int,
    *seconds: float,
    after: tuple[int, ...] = (),
    patient: bool = False,
    gates: tuple[int, ...] = (),
) -> Job:
    queues = (src * 8 + 1, dst * 8 + 2)
    return Job(queues, (src, dst), seconds, after, 0.0, 0.0, True, patient, gates=gates)


def test_kernels_of_a_rank_run_one_after_another_and_of_two_side_by_side() -> None:
    starts, ends = run_jobs([kernel(0, 1.0), kernel(0, 2.0), kernel(1, 2.5)])
    assert (starts, ends) == ([0.0, 1.0, 0.0], [1.0, 3.0, 2.5])


def test_a_kernel_waits_for_what_it_needs_and_for_its_launch() -> None:
    jobs = [transfer(0, 1, 1.0), kernel(1, 1.0, after=(0,)), kernel(0, 1.0, release_s=5.0)]
    assert run_jobs(jobs)[0] == [0.0, 1.0, 5.0]


def test_a_port_carries_one_transfer_at_a_time() -> None:
    assert run_jobs([transfer(0, 1, 1.0), transfer(2, 1, 1.0), transfer(1, 2, 1.0)])[1] == [
        1.0,
        2.0,
        1.0,
    ]


def test_a_transfer_holds_sms_while_it_runs() -> None:
    # Half of the kernel with a transfer beside it at 2 s a kernel, then the rest at 1 s a kernel.
    ends = run_jobs([transfer(0, 1, 1.0), kernel(0, 1.0, 2.0)])[1]
    assert ends == pytest.approx([1.0, 1.5])


def test_a_transfer_that_waits_for_its_data_holds_sms_at_the_receiver_alone() -> None:
    jobs = [kernel(0, 3.0, 9.0), transfer(0, 1, 1.0, after=(0,)), kernel(1, 2.0, 4.0)]
    assert run_jobs(jobs)[1] == pytest.approx([3.0, 4.0, 4.0])


def test_a_receiver_with_a_gate_holds_no_sms_before_it_opens() -> None:
    jobs = [kernel(0, 3.0, 9.0), transfer(0, 1, 1.0, after=(0,), gates=(2,)), kernel(1, 2.0, 4.0)]
    assert run_jobs(jobs)[1] == pytest.approx([3.0, 4.0, 2.0])
    # and a sender that is ready before the gate opens waits for it, with SMs that it holds
    jobs = [kernel(0, 1.0, 3.0), transfer(0, 1, 1.0, gates=(2,)), kernel(1, 2.0, 4.0)]
    assert run_jobs(jobs)[0] == pytest.approx([0.0, 2.0, 0.0])
    assert run_jobs(jobs)[1] == pytest.approx([3.0, 3.0, 2.0])


def test_a_transfer_moves_slower_beside_a_kernel() -> None:
    # A quarter of it while the kernel runs, the rest at full speed.
    ends = run_jobs([transfer(0, 1, 1.0, 4.0), kernel(0, 1.0)])[1]
    assert ends == pytest.approx([1.75, 1.0])


def test_a_transfer_that_comes_during_a_wave_waits_for_its_end() -> None:
    jobs = [kernel(0, 1.0), kernel(1, 2.5), transfer(0, 1, 1.0, after=(0,))]
    late = [jobs[0], kernel(1, 2.5, wave_s=0.7), jobs[2]]
    assert run_jobs(jobs, blocking=True)[0][2] == 1.0
    assert run_jobs(late)[0][2] == 1.0
    # Its receiving end was posted when the kernel had begun, so it waits for the first wave only.
    assert run_jobs(late, blocking=True, kernels_first=True)[0][2] == 1.0
    whole = [jobs[0], kernel(1, 2.5, wave_s=2.5), jobs[2]]
    assert run_jobs(whole, blocking=True, kernels_first=True)[0][2] == 2.5


def test_a_patient_transfer_waits_for_the_last_wave_of_a_kernel() -> None:
    jobs = [kernel(1, 2.5, wave_s=0.7), transfer(0, 1, 1.0, patient=True)]
    assert run_jobs(jobs, blocking=True, kernels_first=True)[0][1] == pytest.approx(1.8)
    assert run_jobs(jobs, blocking=True)[0][1] == 0.0
    # A kernel of one wave holds nobody up: all of its blocks have their SMs at once.
    one = [kernel(1, 2.5, wave_s=2.5), jobs[1]]
    assert run_jobs(one, blocking=True, kernels_first=True)[0][1] == 0.0


def test_the_second_message_of_a_transfer_waits_for_the_kernel_beside_it() -> None:
    pair = transfer(0, 1, 1.0)._replace(messages=2)
    # With nothing beside it they follow one another, and what waits for it waits for both.
    assert run_jobs([pair, kernel(1, 0.5, after=(0,))], blocking=True) == ([0.0, 2.0], [2.0, 2.5])
    # A kernel of ten waves begins beside the first; the second is posted with its last wave.
    jobs = [pair, kernel(1, 5.0, wave_s=0.5)]
    starts, ends = run_jobs(jobs, blocking=True)
    assert (starts, ends) == ([0.0, 0.0], [pytest.approx(5.5), 5.0])
    assert run_jobs(jobs)[1] == [2.0, 5.0]
    # Between the two it holds no SMs: the kernel has 1 s at half speed and 4.5 s of its own.
    held = [pair, kernel(1, 5.0, 10.0, wave_s=0.5)]
    assert run_jobs(held, blocking=True)[1] == pytest.approx([6.5, 5.5])


def test_what_ends_at_once_is_seen_together_whatever_its_number() -> None:
    # Rank 1's next kernel starts when rank 0's ends: the transfer between them is posted first.
    jobs = [
        kernel(1, 1.0, wave_s=1.0),
        kernel(1, 1.0, wave_s=1.0),
        kernel(0, 1.0, wave_s=1.0),
        transfer(0, 1, 0.5, after=(2,)),
    ]
    assert run_jobs(jobs, blocking=True)[0][3] == 1.0


def test_jobs_that_wait_for_one_another_are_reported() -> None:
    with pytest.raises(CycleError):
        run_jobs([kernel(0, 1.0, after=(1,)), kernel(0, 1.0)])


def test_a_delay_holds_nothing() -> None:
    assert run_jobs([Job((), (), (1.0,), ()), kernel(0, 1.0, after=(0,))])[1] == [1.0, 2.0]


def test_transfers_in_both_directions_slow_each_other_down_while_both_move() -> None:
    paces = (1.0, 1.0, 2.0, 2.0)
    assert run_jobs([transfer(0, 1, *paces)])[1] == [1.0]
    assert run_jobs([transfer(0, 1, *paces), transfer(1, 0, *paces)])[1] == [2.0, 2.0]
    # The second begins when the first is half done, and is alone again when that has ended.
    jobs = [transfer(0, 1, *paces), kernel(1, 0.5), transfer(1, 0, *paces, after=(1,))]
    starts, ends = run_jobs(jobs)
    assert starts[2] == 0.5
    assert [ends[0], ends[2]] == pytest.approx([1.5, 2.0])
    # Elsewhere nobody notices.
    assert run_jobs([transfer(0, 1, *paces), transfer(2, 3, *paces)])[1] == [1.0, 1.0]


def test_a_patient_transfer_runs_beside_what_follows_the_thread_blocks_of_a_kernel() -> None:
    merged = kernel(1, 3.5, wave_s=0.7)._replace(tail_s=1.0)
    jobs = [merged, transfer(0, 1, 0.4, patient=True)]
    starts, ends = run_jobs(jobs, blocking=True, kernels_first=True)
    assert starts[1] == pytest.approx(3.5 - 1.0 - 0.7)
    assert ends == pytest.approx([3.5, 2.2])
    # One that comes during the merge waits for nothing.
    late = [merged, transfer(0, 1, 0.4, patient=True)._replace(release_s=2.9)]
    assert run_jobs(late, blocking=True, kernels_first=True)[0][1] == pytest.approx(2.9)


def test_an_early_transfer_comes_first_and_its_next_message_waits_for_a_last_wave() -> None:
    early = transfer(0, 1, 0.4, patient=True)._replace(early=True, messages=2)
    jobs = [kernel(1, 2.5, wave_s=0.7), early]
    starts, ends = run_jobs(jobs, blocking=True, kernels_first=True)
    assert starts[1] == 0.0
    assert ends[1] == pytest.approx(2.5 - 0.7 + 0.4)
    # What comes once the kernel runs is not early.
    late = [jobs[0], early._replace(release_s=0.1)]
    assert run_jobs(late, blocking=True, kernels_first=True)[0][1] == pytest.approx(1.8)


def test_a_kernel_slows_every_transfer_that_moves_at_its_rank() -> None:
    # Both are half done when the kernel begins; beside it the other half takes twice as long.
    jobs = [
        transfer(0, 1, 1.0, 2.0),
        transfer(1, 2, 1.0, 2.0),
        kernel(0, 0.5),
        kernel(1, 9.0, after=(2,)),
    ]
    ends = run_jobs(jobs)[1]
    assert ends[1] == pytest.approx(1.5)
    # The first moved slowly beside the kernel at its source as well: a quarter in that time.
    assert ends[0] == pytest.approx(0.5 + 0.75 * 2)


def test_ends_that_differ_by_rounding_are_one_moment() -> None:
    # Rank 0's second kernel fills the GPU; the transfer comes at the same moment, before it.
    late = 0.1 + 0.2  # 0.30000000000000004
    jobs = [
        kernel(0, 0.3),
        kernel(1, late),
        kernel(0, 1.0, wave_s=0.1),
        transfer(0, 1, 0.5, after=(1,)),
    ]
    assert run_jobs(jobs, blocking=True)[0][3] == pytest.approx(0.3)


def test_jobs_slow_down_alike_where_ranks_share_cores() -> None:
    busy = [
        job._replace(cores=1)
        for job in (kernel(0, 1.0), kernel(1, 2.0), transfer(2, 3, 1.0), kernel(0, 1.0))
    ]
    # Three on two cores until 1.5, then two: the second kernel of rank 0, and half of rank 1's.
    starts, ends = run_jobs(busy, cores=2)
    assert starts == pytest.approx([0.0, 0.0, 0.0, 1.5])
    assert ends == pytest.approx([1.5, 2.5, 1.5, 2.5])
    assert run_jobs(busy, cores=4) == run_jobs(busy)


def test_what_keeps_no_core_busy_takes_its_own_time() -> None:
    delay = Job((), (), (3.0,), ())
    exchange = Job((), (), (2.0,), (), cores=4)
    # The exchange wants all four cores of two, a kernel a fifth: 2.5 times as long.
    ends = run_jobs([delay, exchange, kernel(0, 1.0)._replace(cores=1)], cores=2)[1]
    assert ends == pytest.approx([3.0, 4.5, 2.5])


def test_a_transfer_in_messages_takes_a_core_for_one_at_a_time() -> None:
    job = transfer(0, 1, 1.0)._replace(cores=1, messages=2)
    assert run_jobs([job, kernel(2, 1.0)._replace(cores=1)], cores=1)[1] == pytest.approx(
        [3.0, 2.0]
    )
