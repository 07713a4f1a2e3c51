"""The request path beside peer routers, on one mock engine, in one run."""
