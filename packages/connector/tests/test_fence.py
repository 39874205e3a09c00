"""No save reads a block after it was given away (A5, A7)."""

from __future__ import annotations

import threading

from kvpool_connector.fence import Fence


def test_what_is_not_claimed_in_time_is_withdrawn() -> None:
    fence = Fence(timeout_s=0.0)
    ticket = fence.ticket([1, 2, 3])
    assert fence.overwrite(frozenset({2, 9})) == 1
    assert ticket.claim([1, 2, 3]) == [True, False, True]


def test_a_reader_is_waited_for() -> None:
    fence = Fence(timeout_s=0.0)
    ticket = fence.ticket([1])
    assert ticket.claim([1]) == [True]
    passed = threading.Event()

    def step() -> None:
        assert fence.overwrite(frozenset({1})) == 0
        passed.set()

    thread = threading.Thread(target=step)
    thread.start()
    assert not passed.wait(0.05)
    ticket.release([1])
    assert passed.wait(10)
    thread.join()


def test_a_waiting_save_gets_a_moment() -> None:
    fence = Fence(timeout_s=10.0)
    ticket = fence.ticket([1])

    def save() -> None:
        assert ticket.claim([1]) == [True]
        ticket.release([1])

    thread = threading.Thread(target=save)
    thread.start()
    assert fence.overwrite(frozenset({1})) == 0
    thread.join()


def test_other_blocks_do_not_wait() -> None:
    fence = Fence(timeout_s=1000.0)
    fence.ticket([1]).claim([1])
    assert fence.overwrite(frozenset({2})) == 0
    assert fence.overwrite(frozenset()) == 0


def test_closing_lets_go_of_everything() -> None:
    fence = Fence(timeout_s=1000.0)
    ticket = fence.ticket([1, 2])
    ticket.claim([1])
    assert not fence.drain(0.0)
    ticket.close()
    assert fence.drain(0.0)
    assert fence.overwrite(frozenset({1, 2})) == 0


def test_blocks_known_to_be_stored_are_let_go_unread() -> None:
    fence = Fence(timeout_s=0.0)
    ticket = fence.ticket([1, 2])
    ticket.release([1])
    assert fence.overwrite(frozenset({1})) == 0
    assert ticket.claim([1, 2]) == [False, True]
