"""Records of replayed requests, for tests of what is made of them."""

from __future__ import annotations

from dataclasses import replace

from kvc.evaluation.records import Record

RECORD = Record(
    request_id="a.0",
    session_id="a",
    turn=0,
    request_type="tool",
    input_tokens=1000,
    append_tokens=100,
    asked_tokens=10,
    received_tokens=10,
    ok=True,
    wrong=False,
    error="",
    finish_reason="length",
    mode="direct",
    worker="d0",
    executor="local",
    cached_tokens=900,
    engine_ttft_s=0.04,
    mesh_s=0.002,
    queued_s=0.0,
    ttft_s=0.042,
    engine_latency_s=0.5,
    latency_s=0.502,
    probes=1,
    think_s=2.0,
    started_s=1.0,
    wall_s=0.03,
)
FAILED = replace(RECORD, ok=False, mode="", error="DEADLINE_EXCEEDED", received_tokens=0, cached_tokens=0, ttft_s=0.001)
