"""`turnwise gateway serve`: an engine behind the APIs of OpenAI and Anthropic, whose sessions become episodes."""

from __future__ import annotations

import argparse
import secrets
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from functools import partial

from attrs import define, field

from turnwise import (
    EpisodeResult,
    Host,
    RolloutManager,
    RunConfig,
    Status,
    configure_logging,
    handle_interrupts,
    load_resolved,
)
from turnwise.collector import freeze_start, full_collections_on_growth
from turnwise.config.models import pin_models
from turnwise.errors import ConfigError, InfrastructureError
from turnwise.terminal import write_error, write_output
from turnwise_gateway.control.announcement import announced
from turnwise_gateway.control.control_server import ControlServer
from turnwise_gateway.host import RunningServer
from turnwise_gateway.server import ServerOptions
from turnwise_gateway.serving.lost_sessions import restore_episodes
from turnwise_gateway.serving.output import CONTROL_FILE, REQUESTS_DIR, ServedFolder, locked_folder
from turnwise_gateway.serving.routes import build_serving_app
from turnwise_gateway.serving.served_agent import add_served_agent, model_name
from turnwise_gateway.serving.session_service import SessionService
from turnwise_result_files import RunningEpisodes
from turnwise_result_files.folder_arguments import (
    add_folder_arguments,
    check_same_config,
    config_path,
    existing_results,
)
from turnwise_task_files import load_tasks


class ServeCommand:
    """Serves sessions until it is stopped."""

    help = "serve the model of a run config to agents, and write each session as an episode"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = (
            "Examples:\n"
            "  turnwise gateway serve run.yaml --out runs/served\n"
            "  turnwise gateway serve run.yaml rollout.max_in_flight=32 --out runs/served --port 8000\n"
            "  turnwise gateway serve --resume runs/served\n\n"
            "Starts the engine of the config and listens at two ports of this machine. POST /sessions at the control\n"
            'port opens a session: for a row of the data set ({"uid": ...}), for a row in the request\n'
            '({"task": {...}}), or without a task ({}). The response has the base URLs and the key for the agent,\n'
            "and a control key, with which POST /sessions/ID/score and DELETE /sessions/ID end the session. Its\n"
            f"episode goes to DIR/trajectories.parquet. DIR/{CONTROL_FILE} has the addresses and the secret of the\n"
            "control port; only its owner can read it. Without a reward in the config, the scores are the rewards.\n\n"
            "Ctrl-C or SIGTERM ends it: open sessions are written as aborted ones, with the turns that they have.\n"
            "--resume DIR serves again and adds to the episodes of DIR, also after a kill: sessions that were open\n"
            "then become aborted ones, with their turns if --keep-requests was given. A job may always give\n"
            "CONFIG and --resume DIR: it starts if DIR holds none.\n"
            "Exit codes: 0; 2 for a bad config or bad input; 1 for anything else that failed."
        )
        add_folder_arguments(
            parser,
            example="engine.device=cpu",
            resumes="serve again with the config of DIR, or start CONFIG there",
            has_retries=False,
        )
        parser.add_argument("--port", type=_port, default=0, metavar="N", help="port of the agents; 0 takes a free one")
        parser.add_argument(
            "--control-port", type=_port, default=0, metavar="N", help="control port; 0 takes a free one"
        )
        parser.add_argument("--print-keys", action="store_true", help="print the secret of the control port as well")
        parser.add_argument(
            "--keep-requests", action="store_true", help="write the requests of each session, for `gateway replay`"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        config, host = load_resolved(config_path(arguments, needs_out=True), arguments.overrides)
        config = check_same_config(arguments, config)
        if config.runtime.name != "local":
            raise ConfigError("turnwise gateway serve runs its engine in this process: set runtime=local")
        configure_logging(config.telemetry.log_level, config.telemetry.log_format, whole_stream=True)
        config = pin_models(config, host, weights=False)
        with locked_folder(arguments.resume or arguments.out) as folder:
            _serve(config, host, folder, arguments)
        return 0


def _restore_lost(folder: ServedFolder, server: RunningServer, arguments: argparse.Namespace) -> int:
    """Add the episodes of sessions that a kill has ended; return their number. Calls of earlier sessions learn that."""

    def load() -> tuple[RunConfig, Host]:
        config, host = load_resolved(config_path(arguments, needs_out=True), arguments.overrides)
        return pin_models(config, host, weights=False), host

    sessions = folder.log.read()
    for each in sessions:
        server.add_ended(each.name, each.key_digest)
    lost = folder.find_lost(sessions)
    folder.earlier += restore_episodes(lost, folder.path / REQUESTS_DIR, load)
    return len(lost)


def _port(text: str) -> int:
    number = int(text)
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not in 0..65535")
    return number


@define(eq=False)
class _Site:
    """The two ports, on the event loop of the run."""

    server: RunningServer
    service: SessionService
    secret: str = field(factory=lambda: secrets.token_urlsafe(32), repr=False)
    _parts: AsyncExitStack = field(factory=AsyncExitStack)

    async def open(self, config: RunConfig, control_port: int) -> str:
        """Listen at both ports; return the address of the control port."""
        try:
            await self.server.start()
            self._parts.push_async_callback(self.server.stop)
            options = ServerOptions(port=control_port)
            app = build_serving_app(self.service, self.secret, options, partial(load_tasks, config))
            control = await self._parts.enter_async_context(ControlServer(app, options))
        except OSError as error:
            await self.close()
            raise InfrastructureError(f"the control port cannot be opened: {error}") from error
        except BaseException:
            await self.close()
            raise
        return control.url

    async def close(self) -> None:
        self.service.close()
        await self._parts.aclose()


def _serve(config: RunConfig, host: Host, folder: ServedFolder, arguments: argparse.Namespace) -> None:
    server = RunningServer(model_name(config), ServerOptions(port=arguments.port))
    service = SessionService(server, capacity=config.rollout.max_in_flight * config.runtime.num_workers)
    served = add_served_agent(config, host, service)
    manager = RolloutManager.from_config(served, host, observers=[RunningEpisodes(folder.path)])
    decode = manager.chat.tokenizer.decode if manager.chat else None
    existing = existing_results(arguments)
    num_lost = 0
    if existing == "resume":
        folder.resume(decode)
        num_lost = _restore_lost(folder, server, arguments)
    else:
        folder.start(config, overwrite=existing == "overwrite")
    service.numbers, service.log = folder.numbers(), folder.log
    if arguments.keep_requests:
        service.keep_requests = folder.path / REQUESTS_DIR
    site = _Site(server, service)
    with ExitStack() as stack:
        stack.enter_context(manager)
        feed = manager.open(global_step=config.rollout.global_step, validation=config.rollout.validation)
        service.submit = lambda task, number: feed.submit(task, rollout_n=number)
        url = manager.call(site.open(config, arguments.control_port))
        stack.callback(lambda: manager.call(site.close()))
        stack.enter_context(folder.writing(decode))
        agents_url = server.url
        control_file = folder.path / CONTROL_FILE
        stack.enter_context(announced(control_file, {"url": url, "secret": site.secret, "agents_url": agents_url}))
        stack.enter_context(_interrupts(manager))
        if num_lost:
            _print(f"restored      {num_lost} sessions that were open at a kill, as aborted episodes")
        _print(f"agents' port  {agents_url}")
        _print(f"control port  {url}")
        _print(f"secret        {site.secret if arguments.print_keys else f'in {control_file}'}")
        freeze_start()
        stack.enter_context(full_collections_on_growth())
        counts = _collect(manager, feed, service, folder)
    folder.refuse_removed()
    _print(f"wrote {folder.path}: {folder.num_written} episodes {counts or ''}".rstrip())


def _print(line: str) -> None:
    write_output(f"{line}\n")
    sys.stdout.flush()  # a program that starts this one waits for the addresses


def _collect(
    manager: RolloutManager, episodes: Iterable[EpisodeResult], service: SessionService, folder: ServedFolder
) -> dict[str, int]:
    """Write every episode that ends, until the run is stopped; return the number of episodes by status."""
    counts: Counter[str] = Counter()

    async def note(result: EpisodeResult) -> None:
        service.note_result(result)

    for result in episodes:
        started = result.status is not Status.ABORTED or result.trajectories
        written = folder.write(result) if started else result
        counts[str(result.status)] += 1
        manager.call(note(written))
    return dict(counts)


@contextmanager
def _interrupts(manager: RolloutManager) -> Iterator[None]:
    """Let the first Ctrl-C, SIGTERM or SIGHUP end the sessions, and the second one the process."""

    def handle() -> None:
        restore()
        with suppress(OSError, RuntimeError):  # Ctrl-C ends the reader of a pipe too, or interrupts another write
            write_error("\nturnwise: ending the sessions; press Ctrl-C again to exit without waiting\n")
        manager.abort()

    with handle_interrupts(handle) as restore:
        yield
