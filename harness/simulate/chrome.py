"""Traces in Chrome's trace event format, which Perfetto and chrome://tracing open."""

from harness.base.json_fields import json_text
from harness.simulate.queues import Stream
from harness.simulate.trace import Trace


def to_chrome(trace: Trace) -> str:
    """Write a trace in Chrome's format.

    One process per rank, one thread per stream; times in microseconds.

    Source: Trace Event Format, "JSON Object Format" and "Complete Events".
    """
    lanes = {stream: number for number, stream in enumerate(Stream)}
    used = sorted({(span.rank, span.stream) for span in trace.spans})
    events = [_name("process_name", rank, 0, f"rank {rank}") for rank in range(trace.cp)]
    events += [_name("thread_name", rank, lanes[stream], stream.value) for rank, stream in used]
    events += [
        {
            "ph": "X",
            "name": trace.labels[span.task],
            "cat": span.kind,
            "pid": span.rank,
            "tid": lanes[span.stream],
            "ts": span.start_s * 1e6,
            "dur": (span.end_s - span.start_s) * 1e6,
            "args": {"task": span.task, "bytes": span.size_bytes},
        }
        for span in trace.spans
    ]
    other = trace.summary()
    return json_text({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other})


def _name(what: str, rank: int, lane: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": rank, "tid": lane, "args": {"name": name}}
