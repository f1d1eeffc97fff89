"""Send requests through Flower's grid and collect the replies."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fedssl.engines.flower.messages import read_replies, write_request
from fedssl.engines.remote.messages import Reply, Request
from fedssl.util.text import escape

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict
    from flwr.serverapp import Grid

LONGEST_PAUSE = 0.5  # seconds between two polls
EXTRA_TTL = 60.0  # seconds by which a message outlives its time-out, so Flower does not drop it


class GridTransport:
    """Sends requests through Flower's grid to nodes that can stand for any client."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def place(self, clients: list[int]) -> dict[int, int]:
        """Deal the clients to the nodes in turn."""
        nodes = sorted(self.grid.get_node_ids())
        return {client: nodes[client % len(nodes)] for client in clients} if nodes else {}

    def send(
        self, requests: Mapping[int, Request], timeout: float
    ) -> dict[int, dict[int, Reply] | str]:
        """Send one message to each node; its type names the task."""
        messages = {
            node: (f"train.{request.task}", write_request(request))
            for node, request in requests.items()
        }
        return {
            node: content if isinstance(content, str) else read_replies(content)
            for node, content in self.exchange(messages, timeout).items()
        }

    def exchange(
        self, messages: Mapping[int, tuple[str, RecordDict]], timeout: float
    ) -> dict[int, RecordDict | str]:
        """Send a type and a content to each node; return the contents of the replies, or why not.

        Flower's ``send_and_receive`` polls every three seconds, and its error for a lost node does
        not name the node. So replies are matched by the message that they answer.
        """
        answers: dict[int, RecordDict | str] = {}
        waiting: dict[str, int] = {}
        for node, (kind, content) in messages.items():
            number = self.post(node, kind, content, timeout)
            if number is None:
                answers[node] = "could not be sent"
            else:
                waiting[number] = node
        end, pause = time.monotonic() + timeout, 0.01
        while waiting and time.monotonic() < end:
            came = self.collect(waiting)
            answers |= came
            if waiting:
                pause = 0.01 if came else min(1.3 * pause, LONGEST_PAUSE)
                time.sleep(pause)
        return answers

    def post(self, node: int, kind: str, content: RecordDict, timeout: float) -> str | None:
        """Send a message, and return its number without waiting for the reply."""
        from flwr.app import Message

        message = Message(content, node, kind, ttl=timeout + EXTRA_TTL)
        sent = [number for number in _try(self.grid.push_messages, [message]) if number]
        return sent[0] if sent else None

    def collect(self, waiting: dict[str, int]) -> dict[int, RecordDict | str]:
        """Return the replies that came, by node; their messages are not waited for any more."""
        answers: dict[int, RecordDict | str] = {}
        for reply in self._pull(list(waiting)):
            number = reply.metadata.reply_to_message_id
            if number in waiting:
                content = reply.content if reply.has_content() else _error_text(reply)
                answers[waiting.pop(number)] = content
        return answers

    def _pull(self, numbers: list[str]) -> list[Message]:
        """Pull all replies, or one by one if that fails: a bad reply must not hide the others."""
        try:
            return list(self.grid.pull_messages(numbers))
        except Exception:
            return [reply for n in numbers for reply in _try(self.grid.pull_messages, [n])]


def _try(call: Callable[[list[Any]], Iterable[Any]], argument: list[Any]) -> list[Any]:
    """Call the SuperLink; on failure print one line and return nothing.

    Its SQLite database is locked while a large message is written, and after five seconds other
    calls fail. That must not end the run.
    """
    try:
        return list(call(argument))
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        print(f"fedssl: the SuperLink failed: {escape(line[:200])}", file=sys.stderr, flush=True)
        return []


def _error_text(reply: Message) -> str:
    lines = (reply.error.reason or "").strip().splitlines() or [""]
    return f"Flower's error {reply.error.code}: {lines[-1][:200]}"
