"""Metrics of the server for Prometheus."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from multilin.serving.scheduler import Scheduler
from multilin.serving.turns import TurnStore

FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Counters of requests and tokens, and gauges, which are read when a client asks for the metrics."""

    def __init__(self, scheduler: Scheduler, turns: TurnStore) -> None:
        self.registry = own = CollectorRegistry()
        self.answers = Counter(
            "multilin_http_answers", "Number of answers by path and status.", ["path", "status"], registry=own
        )
        self.first_token = Histogram(
            "multilin_first_token_seconds",
            "Seconds from a request to its first token.",
            buckets=FIRST_TOKEN_SECONDS,
            registry=own,
        )
        self._prompt = Counter("multilin_prompt_tokens", "Number of prompt tokens.", registry=own)
        self._cached = Counter(
            "multilin_cached_tokens", "Number of prompt tokens that were not read again.", registry=own
        )
        self._generated = Counter("multilin_generated_tokens", "Tokens generated.", registry=own)
        gauges: list[tuple[str, str, Callable[[], float]]] = [
            ("waiting_requests", "Prompts that wait for a slot.", lambda: scheduler.counts.waiting),
            ("reading_requests", "Prompts that are being read.", lambda: scheduler.counts.reading),
            ("running_sequences", "Sequences in the batch.", lambda: scheduler.counts.running),
            ("turns", "Turns kept.", lambda: len(turns)),
            ("turn_memory_bytes", "Bytes of the turns kept in memory.", lambda: turns.num_bytes),
        ]
        for name, description, value in gauges:
            Gauge(f"multilin_{name}", description, registry=own).set_function(value)

    def add_request(self, num_prompt: int, num_cached: int, num_generated: int) -> None:
        """Count the tokens of a request that was answered."""
        self._prompt.inc(num_prompt)
        self._cached.inc(num_cached)
        self._generated.inc(num_generated)

    def text(self) -> bytes:
        """All metrics in the format of Prometheus."""
        return generate_latest(self.registry)
