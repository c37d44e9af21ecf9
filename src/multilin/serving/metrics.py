"""Figures for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from multilin.serving.scheduler import Scheduler
from multilin.serving.turns import TurnStore

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics(Collector):
    """Counters of requests and tokens, and gauges that are read when they are asked for."""

    def __init__(self, scheduler: Scheduler, turns: TurnStore) -> None:
        self._scheduler, self._turns, self.registry = scheduler, turns, CollectorRegistry()
        own = self.registry
        self.answers = Counter("multilin_http_answers", "Answers by path and status.", ["path", "status"], registry=own)
        self.first_token = Histogram(
            "multilin_first_token_seconds", "From a request to its first token.", buckets=SECONDS, registry=own
        )
        self._prompt = Counter("multilin_prompt_tokens", "Tokens of prompts.", registry=own)
        self._cached = Counter("multilin_cached_tokens", "Tokens of prompts whose state was kept.", registry=own)
        self._generated = Counter("multilin_generated_tokens", "Tokens generated.", registry=own)
        self.registry.register(self)

    def add_request(self, num_prompt: int, num_cached: int, num_generated: int) -> None:
        """Count the tokens of a request that was answered."""
        self._prompt.inc(num_prompt)
        self._cached.inc(num_cached)
        self._generated.inc(num_generated)

    def collect(self) -> list[GaugeMetricFamily]:
        """The gauges."""
        counts = self._scheduler.counts
        values = {
            "waiting_requests": (counts.waiting, "Prompts that wait for a slot."),
            "reading_requests": (counts.reading, "Prompts that are being read."),
            "running_sequences": (counts.running, "Sequences in the batch."),
            "turns": (len(self._turns), "Turns kept."),
            "turn_memory_bytes": (self._turns.num_bytes, "Memory of the turns kept in it."),
        }
        return [GaugeMetricFamily(f"multilin_{name}", text, value) for name, (value, text) in values.items()]

    def text(self) -> bytes:
        """In the format of Prometheus."""
        return generate_latest(self.registry)
