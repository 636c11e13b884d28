"""Alerts: what is told, how often, in which words, and what happens when nobody listens."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import gradvitals as gv
from gradvitals.alerts import Alert, Command, Message, Webhook
from gradvitals.alerts.alert import AlertError
from gradvitals.alerts.ways import for_discord, for_json, for_slack
from gradvitals.errors import ConfigError
from gradvitals.types import Finding, Severity

SECRET = "T000-B000-s3cr3t"


class Server:
    """Answers each request as the next of `answers` says: a status, or "hang"; 200 once they are used up."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.bodies: list[Any] = []
        self.headers: dict[str, str] = {}
        self.release = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.bodies.append(json.loads(body))
                answer = server.answers.pop(0) if server.answers else 200
                if answer == "hang":
                    server.release.wait(30)
                    return
                self.send_response(answer)
                for name, value in server.headers.items():
                    self.send_header(name, value)
                self.end_headers()

            do_GET = do_POST

            def log_message(self, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/services/{SECRET}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.release.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def finding(name: str = "explosion", severity: Severity = "warning", **more: Any) -> Finding:
    return Finding(id=name, severity=severity, title=f"about {name}", **{"first_step": 7, **more})


class Kept(Alert):
    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self.sent: list[tuple[str, bool, int]] = []

    def send(self, message: Message) -> None:
        self.sent.append((message.finding.id, message.resolved, message.held_back))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [1000.0]
    monkeypatch.setattr("gradvitals.alerts.alert.time.monotonic", lambda: now[0])

    def pass_by(seconds: float) -> None:
        now[0] += seconds

    return pass_by


# -- which findings are told -------------------------------------------------------------------------------------


def test_only_what_is_bad_enough() -> None:
    for severity, told in (("info", 3), ("warning", 2), ("critical", 1)):
        alert = Kept(severity=severity)
        for name in ("info", "warning", "critical"):
            alert.finding(finding(name, severity=name))  # type: ignore[arg-type]
        assert len(alert.sent) == told


def test_a_kind_of_finding_is_told_once_in_a_while_unless_it_gets_worse(clock: Callable[[float], None]) -> None:
    alert = Kept(every=600)
    alert.finding(finding(first_step=1))
    clock(100)
    alert.finding(finding(first_step=2))  # held back
    alert.finding(finding("other"))  # another kind, and tells that one was held back
    alert.finding(finding("explosion", "critical", first_step=3))
    clock(600)
    alert.finding(finding(first_step=4))
    assert alert.sent == [
        ("explosion", False, 0),
        ("other", False, 1),
        ("explosion", False, 0),
        ("explosion", False, 0),
    ]


def test_there_is_a_limit_for_all_together(clock: Callable[[float], None]) -> None:
    alert = Kept(per_hour=3)
    for number in range(10):
        alert.finding(finding(f"kind {number}"))
    assert len(alert.sent) == 3
    clock(3600)
    alert.finding(finding("later"))
    assert alert.sent[3:] == [("later", False, 7)]


def test_that_it_is_over_is_told_where_its_beginning_was() -> None:
    alert, terse = Kept(), Kept(send_resolved=False)
    for one in (alert, terse):
        one.finding(finding(first_step=1))
        one.finding(finding(first_step=1, last_step=9))
        one.finding(finding(first_step=20))  # held back, so its end is not told
        one.finding(finding(first_step=20, last_step=30))
        one.finding(finding("training_stopped", "critical", last_step=7))  # over as it happens: that is the news
    assert alert.sent == [("explosion", False, 0), ("explosion", True, 0), ("training_stopped", False, 1)]
    assert terse.sent == [("explosion", False, 0), ("training_stopped", False, 1)]


def test_what_was_over_before_is_not_told_again_when_its_root_is_found() -> None:
    pointing = {"follows": "lr_too_high"}
    alert = Kept()
    alert.finding(finding(first_step=3))
    alert.finding(finding(first_step=3, last_step=9))
    told = len(alert.sent)
    alert.finding(finding(first_step=3, last_step=9, **pointing))
    assert len(alert.sent) == told
    resumed = Kept()  # and one that remembers nothing of it
    resumed.finding(finding(first_step=3, last_step=9, **pointing))
    assert not resumed.sent


def test_one_fault_makes_one_alert() -> None:
    alert = Kept()
    alert.finding(finding("loss_spike"))  # found before its root
    alert.finding(finding("lr_too_high", first_step=1))
    for name in ("loss_rising", "explosion", "update_ratio", "dead_tensor", "vanishing"):
        alert.finding(finding(name, first_step=20, follows="lr_too_high"))
        alert.finding(finding(name, "critical", first_step=20, follows="lr_too_high"))
        alert.finding(finding(name, first_step=20, last_step=60, follows="lr_too_high"))
    alert.finding(finding("nonfinite", first_step=90, follows="loss_nonfinite"))  # whose root is no news here
    alert.finding(finding("lr_too_high", first_step=1, last_step=100))
    assert alert.sent == [
        ("loss_spike", False, 0),
        ("lr_too_high", False, 0),
        ("nonfinite", False, 0),
        ("lr_too_high", True, 0),
    ]


def test_what_never_arrived_is_not_told_to_be_over() -> None:
    class Down(Kept):
        def send(self, message: Message) -> None:
            if not message.resolved:
                raise OSError("no network")
            super().send(message)

    alert = Down()
    with pytest.raises(OSError, match="no network"):
        alert.finding(finding(first_step=1))
    alert.finding(finding(first_step=1, last_step=9))
    assert alert.sent == []


@pytest.mark.parametrize(
    "wrong", [{"severity": "bad"}, {"every": -1}, {"per_hour": 0}, {"timeout": 0}, {"kind": "teams"}, {"retries": -1}]
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} is .* expected"):
        Webhook("https://example.org/x", **wrong)


# -- the words ---------------------------------------------------------------------------------------------------

HOSTILE = Message(
    finding=Finding(
        id="explosion",
        severity="critical",
        title="@everyone <!channel> <@U123> look\nhere \x1b[31m *bold*",
        tensors=("<script>alert(1)</script>", "`rm -rf`", "c", "d"),
        fixes=("@here do & undo",),
        first_step=3,
        evidence={"traceback": "secret place", "seen": {"x": float("nan")}},
    ),
    run="a run",
)


def test_slack_mentions_nobody() -> None:
    payload = for_slack(HOSTILE)
    text = payload["text"]
    assert "<" not in text.replace("&lt;", "")
    assert not [word for word in ("@everyone", "@here", "<!channel>", "<@U123>") if word in text]
    assert "&lt;!channel&gt;" in text
    assert "do &amp; undo" in text
    assert (payload["mrkdwn"], payload["unfurl_links"]) == (False, False)


def test_discord_mentions_nobody() -> None:
    payload = for_discord(HOSTILE)
    assert payload["allowed_mentions"] == {"parse": []}
    assert "@everyone" not in payload["content"]
    assert r"\*bold\*" in payload["content"]
    assert len(for_discord(Message(finding=finding(fixes=("x" * 9000,)), run="r"))["content"]) <= 2000


def test_a_message_is_plain_lines_and_strict_json() -> None:
    assert HOSTILE.text.splitlines() == [
        r"a run: [critical] @everyone <!channel> <@U123> look\nhere \x1b[31m *bold*",
        "since step 3 in <script>alert(1)</script>, `rm -rf`, c and more (explosion)",
        "fix: @here do & undo",
    ]
    sent = for_json(HOSTILE)
    json.dumps(sent, allow_nan=False)
    assert sent["finding"]["evidence"] == {"seen": {"x": "nan"}}
    assert (sent["run"], sent["severity"], sent["resolved"]) == ("a run", "critical", False)


# -- webhooks ----------------------------------------------------------------------------------------------------


def test_a_message_arrives_where_the_server_fails_twice(server: Server) -> None:
    server.answers = [503, 500]
    Webhook(server.url, backoff=0.01).send(HOSTILE)
    assert [body["finding"]["id"] for body in server.bodies] == ["explosion"] * 3


@pytest.mark.parametrize(("status", "tries"), [(404, 1), (302, 1), (500, 3), (429, 3)])
def test_what_cannot_be_delivered_is_an_error_without_the_url(server: Server, status: int, tries: int) -> None:
    server.answers = [status] * 5
    server.headers = {"Location": server.url} if status == 302 else {"Retry-After": "0.01"}
    place = server.url.split("/")[2]  # the host and the port
    with pytest.raises(AlertError, match=f"^{place} answered with status {status}$") as caught:
        Webhook(server.url, backoff=0.01).send(HOSTILE)
    assert len(server.bodies) == tries
    assert SECRET not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_a_server_that_hangs_and_one_that_is_not_there(server: Server) -> None:
    server.answers = ["hang", "hang"]
    with pytest.raises(AlertError, match=r"did not answer within 0.2 s"):
        Webhook(server.url, timeout=0.2, retries=1, backoff=0).send(HOSTILE)
    assert len(server.bodies) == 2
    with pytest.raises(AlertError, match="could not be reached"):
        Webhook("http://127.0.0.1:9/" + SECRET, retries=0).send(HOSTILE)


def test_the_kind_goes_by_the_host() -> None:
    hosts = {"hooks.slack.com": "slack", "discord.com": "discord", "discordapp.com": "discord"}
    hosts |= {"example.org": "json", "slack.com.example.org": "json", "notdiscord.com": "json"}
    assert {host: Webhook(f"https://{host}/{SECRET}").kind for host in hosts} == hosts


@pytest.mark.parametrize(
    "url", ["ftp://a/b", "file:///etc/passwd", "https:///", "nothing", "https://a b/c", "https://a\n/"]
)
def test_what_is_not_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="not a URL") as caught:
        Webhook(url + SECRET)
    assert SECRET not in str(caught.value)


# -- commands ----------------------------------------------------------------------------------------------------


def test_a_command_gets_json_and_variables(tmp_path: Path) -> None:
    script = (
        'cat > "$0/json"; printf "%s|%s|%s" "$GRADVITALS_SEVERITY" "$GRADVITALS_ID" "$GRADVITALS_TITLE" > "$0/vars"'
    )
    Command(["sh", "-c", script, str(tmp_path)]).send(HOSTILE)
    assert json.loads((tmp_path / "json").read_text())["finding"]["id"] == "explosion"
    assert (tmp_path / "vars").read_text() == f"critical|explosion|{HOSTILE.title}"


def test_a_command_that_fails_or_does_not_end() -> None:
    with pytest.raises(AlertError, match="sh ended with status 3"):
        Command(["sh", "-c", "exit 3"]).send(HOSTILE)
    started = time.monotonic()
    with pytest.raises(AlertError, match=r"had not ended after 0.3 s"):
        Command(["sh", "-c", "sleep 60 & wait"], timeout=0.3).send(HOSTILE)
    assert time.monotonic() - started < 30
    for wrong in ("mail me", [], ["no-such-program-here"]):
        with pytest.raises(ConfigError, match="expected"):
            Command(wrong)


def test_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_HOOK", f"https://hooks.slack.com/{SECRET}")
    texts = {
        "https://discord.com/api/webhooks/1": "<Webhook discord to discord.com>",
        "command:sh -c 'a b'": "<Command sh>",
    }
    texts |= {"env:MY_HOOK": "<Webhook slack to hooks.slack.com>", "slack:https://x.org/": "<Webhook slack to x.org>"}
    assert {text: repr(gv.alerts.from_text(text)) for text in texts} == texts
    for wrong in ("env:NOT_SET", "mailto:me", "command:", "command:'", f"htps://{SECRET}"):
        with pytest.raises(ConfigError) as caught:
            gv.alerts.from_text(wrong)
        assert SECRET not in str(caught.value)
    with pytest.raises(TypeError, match="is not an alert"):
        gv.alerts.as_alert(42)


# -- in a run ----------------------------------------------------------------------------------------------------


def train(run: Path, alerts: list[Any], *, bad: int = 60, stop: bool = False, steps: int = 90) -> gv.Monitor:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = gv.watch(model, optimizer, run=run, alerts=alerts)
    for step in range(steps):
        inputs = torch.randn(16, 4)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True) * (1e4 if step == bad else 1.0)).square().mean()
        loss.backward()
        monitor.observe(loss)
        optimizer.step()
    monitor.close(ValueError("out of data") if stop else None)
    return monitor


def test_a_run_tells_its_findings_and_how_it_ended(server: Server, tmp_path: Path) -> None:
    train(tmp_path / "gpt", [server.url], stop=True)
    told = {(body["finding"]["id"], body["resolved"]) for body in server.bodies}
    assert {("loss_spike", False), ("training_stopped", False)} <= told
    assert all(body["run"] == "gpt" for body in server.bodies)


def test_a_run_whose_alert_fails_says_so_once_and_keeps_the_secret(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server.answers = [404] * 3
    monitor = train(tmp_path / "gpt", [Webhook(server.url, backoff=0.01)], stop=True)
    place = server.url.split("/")[2]  # the host and the port
    assert [f.evidence["about"] for f in monitor.findings if f.id == "sink_error"] == [f"Webhook({place})"]
    assert len(server.bodies) >= 2  # later findings are still tried
    assert "sink_error" not in {body["finding"]["id"] for body in server.bodies}
    printed = "".join(capfd.readouterr())
    assert f"Webhook({place}) failed: AlertError: {place} answered with status 404" in printed
    kept = b"".join(path.read_bytes() for path in (tmp_path / "gpt").rglob("*") if path.is_file())
    assert f"Webhook({place})".encode() in kept
    assert SECRET not in printed
    assert SECRET.encode() not in kept
    assert SECRET not in repr(monitor.findings)
