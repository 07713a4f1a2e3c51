"""A worker without a model: SGLang's HTTP shapes, real KV accounting, modelled time, checkable output.

How to read it, bottom up:
    radix, pool, lease       which pages are where, and whose promises they are
    costs, clock             what a step costs and how modelled time passes
    request, scheduler       one request's life; continuous batching with chunked prefill
    sessions, admission      committed turns; Algorithm 2's facts, tickets
    transfer, bootstrap, pull  prefill/decode pairing
    engine                   the parts put together and the loop that drives them
    schema, http_api, openai_api, link_server, metrics   the doors
    config, main             settings and the process
"""
