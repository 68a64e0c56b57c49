"""The engine's figures in Prometheus' text format."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from dspark_jax.serving.service import Service


def exposition(service: Service) -> bytes:
    """The body of /metrics."""
    registry = CollectorRegistry()
    registry.register(_Collector(service))
    return generate_latest(registry)


class _Collector:
    """Reads the figures when it is asked; between two reads of one scrape they may move on."""

    def __init__(self, service: Service):
        self._service = service

    def collect(self) -> Iterator[Metric]:
        engine = self._service.engine
        figures, counts = engine.figures, engine.figures.speculative
        requests = CounterMetricFamily(
            "dspark_requests", "Requests that ended, by how.", labels=["finish"]
        )
        for finish, number in figures.requests.items():
            requests.add_metric([finish.value], number)
        yield requests
        counters = {
            "dspark_prompt_tokens": ("Tokens of prompts that were run.", figures.prompt_tokens),
            "dspark_tokens": ("Tokens of answers.", figures.tokens),
            "dspark_rounds": ("Passes of the target after prompts.", figures.rounds),
            "dspark_plain_rounds": ("Of these, without drafts.", figures.plain_rounds),
            "dspark_pass_tokens": ("Tokens of these passes, with padding.", figures.passes_tokens),
            "dspark_busy_seconds": ("Seconds in rounds and prompts.", figures.busy_seconds),
            "dspark_speculative_row_rounds": ("A row in a round with drafts.", counts.rounds),
            "dspark_speculative_tokens": ("Tokens that those gave.", counts.tokens),
            "dspark_drafted_tokens": ("Proposed by the drafter.", counts.drafted),
            "dspark_verified_tokens": ("Drafts that the target looked at.", counts.verified),
            "dspark_accepted_tokens": ("Drafts that it accepted.", counts.accepted),
        }
        for name, (help_text, value) in counters.items():
            yield CounterMetricFamily(name, help_text, value=value)
        nothing = float("nan")
        gauges = {
            "dspark_running_requests": ("Requests in a row.", engine.running),
            "dspark_waiting_requests": ("Requests in the queue.", len(engine.waiting)),
            "dspark_queue_limit": ("Requests that may wait.", engine.waiting.limit),
            "dspark_rows": ("Requests answered at a time.", engine.options.rows),
            "dspark_speculating": ("1 while rounds draft.", int(engine.speculating)),
            "dspark_accepted_length": (
                "Tokens of a row in a round with drafts, since the start.",
                figures.accepted_length or nothing,
            ),
            "dspark_verified_per_request": (
                "Drafts verified of a row in a round with drafts, since the start.",
                nothing if figures.verified_per_request is None else figures.verified_per_request,
            ),
        }
        for name, (help_text, value) in gauges.items():
            yield GaugeMetricFamily(name, help_text, value=value)
