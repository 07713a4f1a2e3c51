"""One-hop admission: a turn on hot KV travels with its own Admit, and nobody is asked first.

An engine that says `HOP_CAPABILITY` in its Welcome decides on a request as it arrives when the request's rid is

    kvc-hop-<epoch>-<attempt_number>-<request_id>      epoch: of the life of the engine that is meant, decimal without leading zeros
                                                       attempt_number: decimal without leading zeros
                                                       request_id: 1 to 200 printable ASCII characters, dashes included

The decision is `kvc.core.admit` over the facts of that moment, as for an Admit with the body's session (which is required), the blocks
of the prompt, max_new_tokens as output reserve, known_session, and no prefill offer. Direct: the request runs as if it had arrived with
the ticket of that admission. Any other outcome is an answer before any token, and holds nothing: HTTP 409, streaming or not, with the
error type `HOP_REFUSED` in the endpoint's usual error body and beside it

    "kvc": {
        "reason": a kvc.core.types.Reason value, or `NOT_DIRECT`: admitted by Admit, but to be prefilled in another mode
        "retry_after_s": pause hint in seconds, 0 without one
        "terminal": true when no worker of this size ever takes the turn
        "append_tokens": prompt tokens without KV here
        "epoch": this life of the engine
        "facts": kvc.engine.link.LinkFacts the decision was based on, less what is 0
    }

The head of a reply to an admitted request may carry `CACHED_HEADER`: the prompt tokens that nobody prefills, as in the usage after it.

A rid that was admitted once is answered 409 `ticket-used`, as any ticket is; a malformed one 400 with the field `rid`.
"""

from __future__ import annotations

import re

from kvc.core.types import Attempt

HOP_CAPABILITY = "admit-on-arrival"
CACHED_HEADER = "x-kvc-cached-tokens"
HOP_PREFIX = "kvc-hop-"
HOP_REFUSED = "hop-refused"
NOT_DIRECT = "not-direct"
MAX_REQUEST_ID_CHARS = 200
MAX_EPOCH = 2**64 - 1
MAX_ATTEMPT_NUMBER = 2**32 - 1

_HOP = re.compile(rf"{HOP_PREFIX}(0|[1-9][0-9]{{0,19}})-(0|[1-9][0-9]{{0,9}})-([ -~]{{1,{MAX_REQUEST_ID_CHARS}}})")


def hop_rid(epoch: int, attempt: Attempt) -> str:
    """The rid of a request that asks for its own admission.

    Args:
        epoch: the life of the engine that is meant.
        attempt: the try of the request; no two requests may share it.

    Raises:
        ValueError: a number is out of its range, or the request id is not 1 to 200 printable ASCII characters.
    """
    rid = f"{HOP_PREFIX}{epoch}-{attempt.attempt_number}-{attempt.request_id}"
    if parse_hop_rid(rid) != (epoch, attempt):
        raise ValueError(f"no hop can be named after epoch {epoch} and {attempt}")
    return rid


def parse_hop_rid(rid: str) -> tuple[int, Attempt] | None:
    """The epoch and the attempt in a rid; None when it is not what `hop_rid` writes."""
    found = _HOP.fullmatch(rid)
    if found is None:
        return None
    epoch, number = int(found[1]), int(found[2])
    if epoch > MAX_EPOCH or number > MAX_ATTEMPT_NUMBER:
        return None
    return epoch, Attempt(found[3], number)
