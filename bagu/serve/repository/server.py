"""`bagu serve REPOSITORY`: the main function of the HTTP server's process."""

from pathlib import Path

from bagu.errors import BaguError
from bagu.machine.terminal import counted
from bagu.serve.http.observe.metrics import Metrics
from bagu.serve.http.options import ServerOptions
from bagu.serve.http.server import Server, import_server
from bagu.serve.repository.version import Prepare


def main(
    folder: Path, *, prepare: Prepare, memory_bytes: int | None = None, options: ServerOptions | None = None
) -> None:
    """Run the server until SIGINT or SIGTERM. `prepare` makes the engine of a version."""
    options = options or ServerOptions()
    parts = import_server()
    from bagu.serve.repository.repository import Repository
    from bagu.serve.repository.routes import RepositoryApi

    failed = []

    def exit_server() -> None:
        failed.append(True)
        server.stop()

    models = Repository(
        folder,
        prepare,
        max_queue=options.max_queue,
        stall_s=options.stall_timeout,
        memory_bytes=memory_bytes,
        on_failure=exit_server,
    )
    server = Server(parts, options, RepositoryApi, models, Metrics(folder.name))
    server.run(f"{counted(len(models.models), 'model')} of {folder.name or folder}")
    if failed:
        raise BaguError(f"no model of {folder} could be loaded", hint="the reasons are above")
