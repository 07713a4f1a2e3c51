"""Prompts of a session: real replies stand where the trace's own were, history is shared exactly as the block ids say."""

from __future__ import annotations

import time
from array import array

from kvc.evaluation.prompts import SessionPrompts
from kvc.evaluation.tokens import FIRST_TOKEN, LAST_TOKEN, Pattern, block_pattern, tail_tokens
from kvc.evaluation.trace_files import load_trace
from tests.support.traces import real_trace, request


def ids_of(packed: bytes) -> array[int]:
    ids = array("I")
    ids.frombytes(packed)
    return ids


def common(one: bytes, other: bytes) -> int:
    """Equal tokens at the front."""
    pairs = enumerate(zip(ids_of(one), ids_of(other), strict=False))
    return next((k for k, (a, b) in pairs if a != b), min(len(one), len(other)) // 4)


def reply(count: int) -> bytes:
    return array("I", range(1_000_000, 1_000_000 + count)).tobytes()


def test_tokens_are_in_the_range_of_ids_without_text() -> None:
    for pattern in (block_pattern(24), Pattern(7, "x")):
        for number in (0, 1, 2**30 - 1, 2**30, 2**60 - 1, 2**60, 2**64 - 1):
            ids = ids_of(pattern.tokens(number))
            assert len(ids) == pattern.width
            assert min(ids) >= FIRST_TOKEN
            assert max(ids) <= LAST_TOKEN


def test_a_first_prompt_is_its_blocks_and_a_tail_of_its_own() -> None:
    one = SessionPrompts(24).prompt(request("a", 0, 100, (5, 4)))
    same = SessionPrompts(24).prompt(request("b", 0, 100, (5, 4)))
    assert len(one) == 400
    assert one[: 96 * 4] == b"".join(block_pattern(24).tokens(number) for number in (5, 6, 7, 8))
    assert common(one, same) == 96


def test_a_last_block_with_an_id_is_shared_by_id() -> None:
    one = SessionPrompts(24).prompt(request("a", 0, 100, (5, 5)))
    assert one == SessionPrompts(24).prompt(request("b", 0, 100, (5, 5)))
    assert common(one, SessionPrompts(24).prompt(request("c", 0, 100, (5, 4), (40, 1)))) == 96


def test_an_append_follows_the_reply_that_was_given() -> None:
    session = SessionPrompts(24)
    first = session.prompt(request("a", 0, 100, (5, 4), output=30))
    second = session.prompt(request("a", 1, 200, (5, 8)), reply(30))
    assert session.kept_tokens == 130
    assert second[: len(first)] == first
    assert second[len(first) : len(first) + 120] == reply(30)
    # From the next block boundary on, tokens follow the ids again: block index 6 (id 11) begins at token 144.
    assert second[144 * 4 : 192 * 4] == block_pattern(24).tokens(11) + block_pattern(24).tokens(12)
    assert len(second) == 800


def test_an_append_that_fills_exactly_the_reply() -> None:
    session = SessionPrompts(24)
    first = session.prompt(request("a", 0, 100, (5, 4), output=30))
    assert session.prompt(request("a", 1, 130, (5, 5)), reply(30)) == first + reply(30)


def test_a_turn_too_short_for_the_reply_keeps_the_common_blocks() -> None:
    session = SessionPrompts(24)
    first = session.prompt(request("a", 0, 100, (5, 4), output=30))
    second = session.prompt(request("a", 1, 129, (5, 5)), reply(30))
    assert session.kept_tokens == 96
    assert common(first, second) == 96


def test_a_rewrite_keeps_the_common_blocks_only() -> None:
    session = SessionPrompts(24)
    first = session.prompt(request("a", 0, 240, (5, 10), output=5))
    second = session.prompt(request("a", 1, 400, (5, 3), (50, 13)), reply(5))
    assert session.kept_tokens == 72
    assert common(first, second) == 72


def test_history_with_replies_survives_a_rewrite_and_a_return_to_it() -> None:
    session = SessionPrompts(24)
    session.prompt(request("a", 0, 100, (5, 4), output=30))
    main = session.prompt(request("a", 1, 200, (5, 8), output=5), reply(30))
    side = session.prompt(request("a", 2, 150, (5, 6)), reply(5))
    assert common(main, side) == 144  # the blocks that hold the reply, as they were sent
    session.prompt(request("a", 3, 60, (90, 2)), reply(10))
    back = session.prompt(request("a", 4, 300, (5, 12)), reply(10))
    assert session.kept_tokens == 0
    assert common(main, back) == 192


def test_a_failed_turn_leaves_no_reply() -> None:
    session = SessionPrompts(24)
    first = session.prompt(request("a", 0, 100, (5, 4), output=30))
    second = session.prompt(request("a", 1, 200, (5, 8)))
    assert session.kept_tokens == 100
    assert second[: len(first)] == first


def test_trace_outputs_ignore_replies() -> None:
    turns = [request("a", 0, 100, (5, 4), output=30), request("a", 1, 200, (5, 8))]
    session = SessionPrompts(24, "trace")
    prompts = [session.prompt(turn, reply(30)) for turn in turns]
    assert common(*prompts) == 96
    assert session.kept_tokens == 96
    assert prompts[1][:768] == SessionPrompts(24).prompt(request("b", 0, 192, (5, 8)))


def test_a_trace_without_ids_appends_and_shares_nothing_else() -> None:
    session = SessionPrompts(0)
    first = session.prompt(request("a", 0, 100, output=30))
    second = session.prompt(request("a", 1, 150), reply(30))
    assert second.startswith(first + reply(30))
    third = session.prompt(request("a", 2, 90), reply(1))
    assert common(second, third) == 0
    assert common(first, SessionPrompts(0).prompt(request("b", 0, 100))) == 0


def test_tails_differ_between_requests_from_their_first_token() -> None:
    tails = [ids_of(tail_tokens(f"a.{k}", 5)) for k in range(200)]
    assert len({tail[0] for tail in tails}) == 200
    assert ids_of(tail_tokens("a.0", 200))[:5] == tails[0]


def test_real_sessions_grow_as_their_traces_say() -> None:
    """97 % of the turns are appends; making a prompt costs far below a millisecond on average."""
    trace = load_trace(real_trace("weka_fresh52_4449.kvt.jsonl.gz"))
    appended = total = 0
    began = time.process_time()
    for turns in trace.sessions().values():
        session = SessionPrompts(trace.block_tokens)
        output = b""
        for turn in turns:
            prompt = session.prompt(turn, output)
            assert len(prompt) == 4 * turn.input_tokens
            total += 1
            appended += turn.input_tokens - session.kept_tokens <= 8192
            output = reply(turn.output_tokens)
    assert total == 4449
    assert appended / total > 0.93
    assert (time.process_time() - began) / total < 0.005
