"""An OpenAI-compatible server: continuous batching, states that are kept at the ends of turns, sessions and forks."""
