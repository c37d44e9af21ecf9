"""An OpenAI-compatible server with continuous batching and sessions, which keeps the state after each turn."""
