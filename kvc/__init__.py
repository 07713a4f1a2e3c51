"""KVC mesh: session-aware serving of multi-turn LLM sessions with prefill/decode disaggregation."""
