from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvc.core.blocks import pack_tokens
from kvc.engine import kvvalue
from kvc.engine.kvvalue import IDS_VOCAB, PRIME, TEXT_VOCAB

ids = st.lists(st.integers(0, 2**31 - 2), max_size=120)


def slow_state(state: int, tokens: list[int]) -> int:
    for token in tokens:
        state = (state * 2**32 + token + 1) % PRIME
    return state


@given(start=st.integers(0, PRIME - 1), tokens=ids, page=st.sampled_from([1, 3, 16, 24, 64]))
def test_runs_and_pages_give_the_state_of_the_recurrence(start: int, tokens: list[int], page: int) -> None:
    packed = pack_tokens(tokens)
    assert kvvalue.advance(start, packed) == slow_state(start, tokens)
    values, after = kvvalue.page_values(start, packed, page)
    full = len(tokens) // page * page
    assert len(values) == len(tokens) // page
    assert after == kvvalue.state_of(start, values) == slow_state(start, tokens[:full])


def test_long_runs_are_cut_without_a_seam() -> None:
    tokens = list(range(5000))
    assert kvvalue.advance(7, pack_tokens(tokens)) == slow_state(7, tokens)


@given(tokens=st.lists(st.integers(0, 100), min_size=1, max_size=40), at=st.integers(0, 39), count=st.integers(1, 5))
def test_any_changed_token_changes_the_reply(tokens: list[int], at: int, count: int) -> None:
    other = list(tokens)
    other[at % len(other)] += 1
    one = kvvalue.expected_output(pack_tokens(tokens), count, IDS_VOCAB, 5)
    assert one != kvvalue.expected_output(pack_tokens(other), count, IDS_VOCAB, 5)
    assert one != kvvalue.expected_output(pack_tokens([*tokens, 0]), count, IDS_VOCAB, 5), "token 0 is visible, too"


def test_output_is_what_its_own_tokens_say_it_is() -> None:
    prompt = [1, 2, 3]
    output = kvvalue.expected_output(pack_tokens(prompt), 8, IDS_VOCAB, 5)
    for index in range(8):
        state = kvvalue.advance(5, pack_tokens(prompt + output[:index]))
        assert kvvalue.next_token(state, IDS_VOCAB) == output[index]


def test_vocabularies_stay_in_their_ranges() -> None:
    text = kvvalue.expected_output(b"", 500, TEXT_VOCAB, kvvalue.salt("m"))
    assert all(32 + 3 <= token <= 126 + 3 for token in text)
    numbers = kvvalue.expected_output(b"", 500, IDS_VOCAB, kvvalue.salt("m"))
    assert all(259 <= token < 2**31 - 1 for token in numbers)


def test_models_do_not_share_replies() -> None:
    assert kvvalue.salt("a") != kvvalue.salt("b")
