"""`crossspec stats` against a tiny server, whose page is what our exporter publishes."""

import contextlib
import http.server
import socket
import threading

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Histogram, generate_latest
from test_dashboard import of_vllm

from vllm_crossspec.cli import server
from vllm_crossspec.metrics.export import Publisher, _make_counters
from vllm_crossspec.metrics.routing import COUNTS

ENGINES = (770, 771)


class Published:
    """What two engines with a router of two drafters publish, and vLLM's count of rounds; no other test's series."""

    def __init__(self):
        metrics = _make_counters()
        self.publishers = [Publisher(metrics, engine) for engine in ENGINES]
        self.registry = CollectorRegistry()
        self.latency = Histogram("vllm:inter_token_latency_seconds", "", ["engine"], registry=self.registry)

    def publish(self, drafters, decisions=None, rounds=0):
        """Totals of each engine: drafts, draft tokens, accepted tokens by drafter; its router's; vLLM's new rounds."""
        for publisher in self.publishers:
            publisher.add_acceptance(
                {
                    name: {"drafts": drafts, "draft_tokens": tokens, "accepted_tokens": accepted,
                           "accepted_per_position": [accepted]}
                    for name, (drafts, tokens, accepted) in drafters.items()
                }
            )  # fmt: skip
            zero = {**dict.fromkeys(COUNTS, 0), "backlog_histogram": []}
            for name, count in (decisions or {}).items():
                routed = {name: {**zero, "decisions": count, "backlog_histogram": [0] * 10}}
                publisher.add_routing(routed, {})
            for _ in range(rounds):
                self.latency.labels(publisher.engine).observe(0.01)

    def text(self, names):
        """The page, of these drafters alone: other tests publish to the same registry."""
        ours = generate_latest(REGISTRY).decode().splitlines()
        lines = [line for line in ours if "#" in line or any(f'drafter="{name}"' in line for name in names)]
        return "\n".join([*lines, generate_latest(self.registry).decode()])


@contextlib.contextmanager
def serving(pages, status=200):
    """The address of a server that answers /metrics with these pages in turn, the last one ever after."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            assert self.path == "/metrics"
            self.send_response(status)
            self.end_headers()
            self.wfile.write((pages.pop(0) if len(pages) > 1 else pages[0]).encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def cells(printed):
    """Rows of the tables that were printed, by their first cell."""
    lines = [line.strip("┃│ ").replace("┃", "│") for line in printed.splitlines() if "│" in line]
    return [[cell.strip() for cell in line.split("│")] for line in lines]


def test_stats_are_by_drafter(crossspec):
    published = Published()
    published.publish({"tree-a": (3, 90, 7), "lookup-a": (0, 0, 0)}, {"tree-a": 5, "lookup-a": 1}, rounds=8)
    with serving([published.text(["tree-a", "lookup-a"])]) as url:
        for address in (url, f"{url}/", f"{url}/metrics"):
            status, out, _ = crossspec("stats", address)
            assert status == 0 and cells(out) == [
                ["lookup-a", "2", "0", "0", "0", "1.00"],
                ["tree-a", "10", "6", "180", "14", "2.40"],
                ["all", "16", "6", "180", "14", "1.88"],
            ]
    assert all(name in out for name in ("rounds with drafts", "draft tokens", "acceptance length"))


def test_stats_without_a_router_or_vllms_counts(crossspec):
    """A drafter alone has all rounds; with --disable-log-stats vLLM does not count them."""
    published = Published()
    published.publish({"tree-b": (2, 60, 3)})
    pages = [published.text(["tree-b"])]
    published.publish({"tree-b": (2, 60, 3)}, rounds=6)
    with serving([*pages, published.text(["tree-b"])]) as url:
        printed = [crossspec("stats", url)[1] for _ in range(2)]
    assert list(map(cells, printed)) == [
        [["tree-b", "-", "4", "120", "6", "-"]],
        [["tree-b", "12", "4", "120", "6", "1.50"]],
    ]


def test_stats_of_what_is_new(crossspec, monkeypatch):
    """Differences, until the server ends; one that was started anew counts from 0."""
    published, naps = Published(), []
    published.publish({"tree-c": (3, 90, 7)}, rounds=4)
    first = published.text(["tree-c"])
    published.publish({"tree-c": (5, 150, 10)}, rounds=3)
    pages = [first, published.text(["tree-c"]), first, "gone"]
    monkeypatch.setattr(server.time, "sleep", naps.append)
    with serving(pages) as url:
        status, out, err = crossspec("stats", url, "--watch", 2)
    assert naps == [2.0] * 3 and status == 2 and "has no metrics of crossspec" in err
    assert cells(out) == [
        ["tree-c", "6", "4", "120", "6", "2.00"],
        ["tree-c", "8", "6", "180", "14", "2.75"],
    ]


@pytest.mark.parametrize("page", ["# HELP vllm:x\nvllm:x 1\n", "<html>no metrics {</html>", ""])
def test_stats_of_another_server_are_refused(page, crossspec):
    with serving([page]) as url:
        status, out, err = crossspec("stats", url)
    assert status == 2 and not out and err.count("\n") == 1
    assert f"crossspec: {url} has no metrics of crossspec" in err


def test_stats_of_no_server_are_refused(crossspec):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        status, _, err = crossspec("stats", f"http://127.0.0.1:{free.getsockname()[1]}")
    assert status == 2 and "/metrics does not answer (" in err and err.count("\n") == 1
    with serving(["no"], status=404) as url:
        status, _, err = crossspec("stats", url)
    assert status == 2 and err == f"crossspec: {url}/metrics answers 404 (Not Found): is it a vLLM server?\n"
    for address in ("localhost:8000", "http://no port", "http://[", "http://127.0.0.1:port"):
        status, _, err = crossspec("stats", address)
        assert status == 2 and err.startswith("crossspec: ") and err.count("\n") == 1, address


def test_stats_count_what_vllm_publishes():
    assert server.ALL_ROUNDS in of_vllm()
