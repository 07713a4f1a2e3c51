"""What things cost, in modelled seconds: prefill, a decode step, a KV transfer.

The presets reproduce the measurements of the KVC router's authors for Qwen3-30B-A3B on one H100 (TP1):

    measured                                                                    source                        model
    re-prefill of 50-90K tokens: 1.5-3 s                                        seed 000 section 9 item 3     1.7-3.1 s
    transfer of 50-90K tokens over TCP loopback: 1.5-4 s                        seed 000 section 9 item 3     2.0-3.7 s
    the same over 200 Gb/s RDMA: about 0.2 s                                    seed 000 section 9 item 3     0.20-0.35 s
    append-prefill of 5K tokens: about 0.2 s                                    seed 002, target table        0.18 s
    Direct TTFT p50 0.043 s, p90 0.054 s (appends of about 640 and 1,000)       seed 003, direct-to-D table   0.042 and 0.053 s
    Direct latency p50 0.495 s (about 120 tokens of output at 30K of context)   seed 003, direct-to-D table   0.50 s

KV is 98,304 bytes a token (R22): 48 layers, K and V, 4 heads of 128, 2 bytes each. A hand-over takes 30 ms besides the bytes (R24).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs of one worker.

    Attributes:
        prefill_tokens_per_s: prefill speed within a chunk.
        prefill_base_s: fixed cost of one prefill chunk.
        decode_base_s: fixed cost of one decode step.
        decode_request_s: cost of each request in a decode step.
        decode_token_s: cost of reading the KV of one context token in a decode step.
        kv_bytes_per_token: KV size.
        transfer_bytes_per_s: bandwidth of the link out of a prefill worker.
        transfer_latency_s: fixed cost of one hand-over.
    """

    prefill_tokens_per_s: float
    prefill_base_s: float
    decode_base_s: float
    decode_request_s: float
    decode_token_s: float
    kv_bytes_per_token: int
    transfer_bytes_per_s: float
    transfer_latency_s: float

    def prefill_s(self, tokens: int) -> float:
        """Seconds for one prefill chunk."""
        return self.prefill_base_s + tokens / self.prefill_tokens_per_s

    def decode_s(self, requests: int, context_tokens: int, steps: int = 1) -> float:
        """Seconds for some decode steps of an unchanging batch.

        Args:
            requests: requests in the batch.
            context_tokens: their context lengths, added up, before the first step.
            steps: steps; each adds one token to every context.
        """
        grown = requests * steps * (steps - 1) // 2
        each = self.decode_base_s + requests * self.decode_request_s
        return steps * each + (steps * context_tokens + grown) * self.decode_token_s

    def transfer_s(self, tokens: int) -> float:
        """Seconds the link is busy with the KV of some tokens, without the latency."""
        return tokens * self.kv_bytes_per_token / self.transfer_bytes_per_s

    @property
    def transfer_tokens_per_s(self) -> float:
        """Transfer speed, to be quoted to routers."""
        return self.transfer_bytes_per_s / self.kv_bytes_per_token

    def chunked_prefill_tokens_per_s(self, chunk_tokens: int) -> float:
        """Prefill speed of long prompts, to be quoted to routers."""
        return chunk_tokens / self.prefill_s(chunk_tokens)


_KV_BYTES: Final = 98_304
_H100: Final = {
    "prefill_tokens_per_s": 32_000.0,
    "prefill_base_s": 0.022,
    "decode_base_s": 0.0028,
    "decode_request_s": 0.0001,
    "decode_token_s": 2.9e-8,  # 98,304 bytes at 3.35 TB/s
}

PRESETS: Final[dict[str, CostModel]] = {
    "h100-rdma": CostModel(**_H100, kv_bytes_per_token=_KV_BYTES, transfer_bytes_per_s=25e9, transfer_latency_s=0.030),
    "h100-tcp": CostModel(**_H100, kv_bytes_per_token=_KV_BYTES, transfer_bytes_per_s=2.4576e9, transfer_latency_s=0.030),
    "tiny": CostModel(
        prefill_tokens_per_s=100_000.0,
        prefill_base_s=0.001,
        decode_base_s=0.001,
        decode_request_s=0.0,
        decode_token_s=0.0,
        kv_bytes_per_token=1000,
        transfer_bytes_per_s=1e9,
        transfer_latency_s=0.001,
    ),
}
"""Cost models by name; `tiny` is for tests."""
