"""The client's check of replies: incremental, and the same as computing each from the whole prompt."""

from __future__ import annotations

import random

import pytest

from kvc.core.blocks import pack_tokens
from kvc.engine import kvvalue
from kvc.evaluation.verify import KvValueVerifier


def whole(prompt: bytes, count: int, model: str = "m") -> bytes:
    return pack_tokens(kvvalue.expected_output(prompt, count, kvvalue.IDS_VOCAB, kvvalue.salt(model)))


def tokens(rng: random.Random, count: int) -> bytes:
    return pack_tokens([rng.randrange(2**31 - 1) for _ in range(count)])


def test_a_conversation_of_appends_rewrites_and_repeats() -> None:
    rng = random.Random(1)
    verifier = KvValueVerifier("m")
    prompt, reply = tokens(rng, 50), b""
    for turn in range(40):
        count = rng.randrange(1, 12)
        expected = verifier.expected("s", prompt, count)
        assert expected == whole(prompt, count)
        reply = expected
        step = turn % 4
        if step == 0:
            prompt = prompt + reply + tokens(rng, rng.randrange(30))
        elif step == 1:
            prompt = prompt + tokens(rng, 7)  # the reply was dropped
        elif step == 2:
            prompt = prompt[: 4 * (len(prompt) // 8)] + tokens(rng, 9)


def test_sessions_do_not_mix_and_can_be_forgotten() -> None:
    verifier = KvValueVerifier("m")
    one, other = pack_tokens([1, 2, 3]), pack_tokens([1, 2, 3, 4])
    assert verifier.expected("session-1", one, 3) == whole(one, 3)
    assert verifier.expected("session-12", other, 3) == whole(other, 3)
    verifier.forget("session-1")
    verifier.forget("unknown")
    assert verifier.expected("session-1", other, 3) == whole(other, 3)


def test_models_answer_differently() -> None:
    prompt = pack_tokens([9] * 10)
    assert KvValueVerifier("m").expected("s", prompt, 4) == whole(prompt, 4)
    assert KvValueVerifier("n").expected("s", prompt, 4) != whole(prompt, 4)


@pytest.mark.parametrize("at", [0, 7, 99])
def test_one_changed_token_changes_the_reply(at: int) -> None:
    ids = list(range(300, 400))
    right = KvValueVerifier("m").expected("s", pack_tokens(ids), 3)
    ids[at] += 1
    assert KvValueVerifier("m").expected("s", pack_tokens(ids), 3) != right
