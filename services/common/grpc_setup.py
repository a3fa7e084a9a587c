"""Servers and channels with the same limits, keepalive, authentication and health everywhere.

`server` and `channel` are for threads (the learner), `aio_server` and `aio_channel` for an event loop (the rollout).
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.common.grpc_auth import AioServerAuth, ClientCalls, GrpcCredentials, ServerAuth, aio_client_calls
from services.config import SecurityConfig

T = TypeVar("T")

# On both ends: gRPC's own limit of 4 MiB holds for receiving. Larger payloads are streamed in chunks.
MAX_MESSAGE_BYTES = 64 * 2**20
# A peer that vanished without closing its connection is noticed after the sum of these two.
KEEPALIVE_SECONDS = 3.0
KEEPALIVE_TIMEOUT_SECONDS = 5.0
_STOP_GRACE_SECONDS = 2.0

_COMMON: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", int(KEEPALIVE_SECONDS * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_SECONDS * 1000)),
    # The answer to a keepalive ping is awaited for this long, 60 s by default, whatever the line above says: seen with
    # grpcio 1.85, where a frozen peer went unnoticed for a minute.
    ("grpc.http2.ping_timeout_ms", int(KEEPALIVE_TIMEOUT_SECONDS * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_SERVER: list[tuple[str, int]] = [
    *_COMMON,
    # Two servers on one port would each get some of the calls; the second must fail to bind instead.
    ("grpc.so_reuseport", 0),
    # Without these a server closes connections that ping more often than every five minutes.
    ("grpc.http2.min_ping_interval_without_data_ms", int(KEEPALIVE_SECONDS * 500)),
    ("grpc.http2.max_ping_strikes", 0),
]
_CHANNEL: list[tuple[str, int]] = [
    *_COMMON,
    # A restarted peer is found again within seconds, not after gRPC's default of up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Services talk to each other directly; a proxy of the environment is for the internet.
    ("grpc.enable_http_proxy", 0),
]


class RpcFailed(RuntimeError):
    """A call that failed, in one sentence. code: gRPC's status code."""

    def __init__(self, message: str, code: grpc.StatusCode) -> None:
        super().__init__(message)
        self.code = code


class Server:
    """A server for threads. Add servicers to `grpc`, then `start`; health says SERVING until `stop`."""

    def __init__(self, host: str, port: int, credentials: GrpcCredentials, max_workers: int) -> None:
        credentials.refuse_insecure(host, "listen on")
        self._pool = ThreadPoolExecutor(max_workers, thread_name_prefix="grpc")
        interceptors: list[Any] = [ServerAuth(credentials.token)] if credentials.token else []
        self.grpc = grpc.server(self._pool, interceptors=interceptors, options=_SERVER)
        self.health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.grpc)
        self.host, self.port = host, _bind(self.grpc, host, port, credentials)

    def start(self) -> None:
        self.grpc.start()

    def stop(self, grace_seconds: float = _STOP_GRACE_SECONDS) -> None:
        """Says NOT_SERVING, refuses new calls, and cuts those that still run after the grace. Idempotent."""
        self.health.enter_graceful_shutdown()
        self.grpc.stop(grace_seconds).wait(grace_seconds + 5.0)
        self._pool.shutdown(wait=False, cancel_futures=True)


class AioServer:
    """A server for an event loop, made inside it. Add servicers to `grpc`, then `start`."""

    def __init__(self, host: str, port: int, credentials: GrpcCredentials) -> None:
        credentials.refuse_insecure(host, "listen on")
        interceptors = [AioServerAuth(credentials.token)] if credentials.token else []
        self.grpc = grpc.aio.server(interceptors=interceptors, options=_SERVER)
        self.health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.grpc)
        self.host, self.port = host, _bind(self.grpc, host, port, credentials)

    async def start(self) -> None:
        await self.grpc.start()

    async def stop(self, grace_seconds: float = _STOP_GRACE_SECONDS) -> None:
        """Says NOT_SERVING, refuses new calls, and cuts those that still run after the grace. Idempotent."""
        await self.health.enter_graceful_shutdown()
        await self.grpc.stop(grace_seconds)


def server(host: str, port: int, *, security: SecurityConfig, max_workers: int = 32) -> Server:
    """A bound server for threads; port 0 takes a free one, see `Server.port`.

    max_workers: calls served at once; a waiting call holds one. Raises InsecureError, and ValueError where the port is
    in use.
    """
    return Server(host, port, _credentials(security), max_workers)


def aio_server(host: str, port: int, *, security: SecurityConfig) -> AioServer:
    """As `server`, for the running event loop."""
    return AioServer(host, port, _credentials(security))


def channel(address: str, *, security: SecurityConfig) -> grpc.Channel:
    """A channel to host:port for threads. It connects at the first call and reconnects by itself.

    Calls carry the token and, where none is given, a deadline of DEFAULT_CALL_SECONDS. Raises InsecureError.
    """
    credentials = _credentials(security)
    credentials.refuse_insecure(_host_of(address), "connect to")
    tls = credentials.channel_credentials()
    raw = grpc.insecure_channel(address, _CHANNEL) if tls is None else grpc.secure_channel(address, tls, _CHANNEL)
    return grpc.intercept_channel(raw, ClientCalls(credentials.token))


def aio_channel(address: str, *, security: SecurityConfig) -> grpc.aio.Channel:
    """As `channel`, for an event loop."""
    credentials = _credentials(security)
    credentials.refuse_insecure(_host_of(address), "connect to")
    tls, interceptors = credentials.channel_credentials(), aio_client_calls(credentials.token)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_CHANNEL, interceptors=interceptors)
    return grpc.aio.secure_channel(address, tls, options=_CHANNEL, interceptors=interceptors)


def call(method: Callable[..., T], request: Any, *, timeout_seconds: float, what: str) -> T:
    """One unary call of a stub's method. what: completes "could not ...". Raises RpcFailed with one sentence."""
    try:
        return method(request, timeout=timeout_seconds)
    except grpc.RpcError as error:
        raise RpcFailed(explain(error, what, timeout_seconds=timeout_seconds), error.code()) from error


def explain(error: Any, what: str, *, timeout_seconds: float | None = None) -> str:
    """One sentence about a failed call, for an operator: what did not happen, why, and what to do about it."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return (
            f"Could not {what}: a message exceeds the limit of {MAX_MESSAGE_BYTES} bytes ({details}); "
            "send it in chunks, or fewer items at once."
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        waited = f"within {timeout_seconds:g} s" if timeout_seconds else "in time"
        return f"Could not {what}: the peer did not answer {waited}."
    if code is grpc.StatusCode.UNAVAILABLE:
        return f"Could not {what}: the peer cannot be reached ({details})."
    return f"Could not {what}: {code.name}: {details}"


def is_healthy(address: str, *, security: SecurityConfig, timeout_seconds: float = 2.0) -> bool:
    """Whether a service answers at host:port and says that it serves."""
    with channel(address, security=security) as link:
        try:
            answer = health_pb2_grpc.HealthStub(link).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_seconds, wait_for_ready=False
            )
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _credentials(security: SecurityConfig) -> GrpcCredentials:
    return GrpcCredentials.from_environment(allow_insecure=security.allow_insecure)


def _bind(bare: grpc.Server | grpc.aio.Server, host: str, port: int, credentials: GrpcCredentials) -> int:
    tls = credentials.server_credentials()
    address = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
    try:
        bound = bare.add_insecure_port(address) if tls is None else bare.add_secure_port(address, tls)
    except RuntimeError as error:
        raise ValueError(_why_not_bound(host, port)) from error
    if bound == 0:
        raise ValueError(_why_not_bound(host, port))
    return int(bound)


def _why_not_bound(host: str, port: int) -> str:
    """The library says no more than that binding failed, so the reason is asked for with a socket of our own."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"Port {port} on {host} is in use; choose another one, or 0 for any that is free."
        return f"Cannot listen on port {port} of {host}: {error.strerror or error}."
    return f"Cannot listen on port {port} of {host}."


def _host_of(address: str) -> str:
    if address.startswith("unix:"):
        return "localhost"
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or not host:
        raise ValueError(f"An address must look like HOST:PORT, not {address!r}.")
    return host
