"""Build Flower's client app and server app from plain functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fedssl.engines.flower.environment import require_flower
from fedssl.engines.flower.messages import GREETING

if TYPE_CHECKING:
    from flwr.app import Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

# From a message's content and the node's settings (``--node-config``) to the reply's content.
Answer = Callable[["RecordDict", Mapping[str, Any]], "RecordDict"]


def build_client_app(
    tasks: Iterable[str], answer: Answer, greet: Answer | None = None
) -> ClientApp:
    """Build an app that answers requests for ``tasks``, and greetings where there is ``greet``."""
    require_flower()
    from flwr.app import Message
    from flwr.clientapp import ClientApp

    def reply_with(function: Answer) -> Callable[[Message, Context], Message]:
        def reply(message: Message, context: Context) -> Message:
            return Message(function(message.content, context.node_config), reply_to=message)

        return reply

    app = ClientApp()
    for task in tasks:
        app.train(task)(reply_with(answer))
    if greet is not None:
        app.query(GREETING)(reply_with(greet))
    return app


def build_server_app(serve: Callable[[Grid, Mapping[str, Any]], None]) -> ServerApp:
    """Build an app that calls ``serve`` with the grid and the ``--run-config``."""
    require_flower()
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(grid, context.run_config)

    return app
