"""The front door: OpenAI-, Anthropic- and SGLang-shaped HTTP, decided in process and spliced as bytes."""
