"""A worker without a model: SGLang's HTTP shapes, real KV accounting, modelled time, checkable output.

How to read it, bottom up:
    node, radix, pool, lease    which pages are where, and whose promises they are
    costs, clock                what a step costs, and how modelled time passes
    request, scheduler          one request's life; continuous batching with chunked prefill
    sessions, residency         committed turns; what is resident, for others
    admission                   Algorithm 2's facts, and tickets
    transfer, bootstrap, pull   prefill/decode pairing
    engine                      the parts put together, and the loop that drives them
    schema, replies             requests and answers; doors: http_api, openai_api, link_server, metrics
    config, main                settings and the process
"""
