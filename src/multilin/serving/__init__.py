"""An OpenAI-compatible server with continuous batching, states that are kept after turns, sessions and forks."""
