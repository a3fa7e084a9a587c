"""Who may call: a shared token in every call's metadata, optionally mutual TLS, and no open ports without either.

Token: SPECROLL_GRPC_TOKEN or the file named by SPECROLL_GRPC_TOKEN_FILE. TLS: SPECROLL_TLS_CA, SPECROLL_TLS_CERT and
SPECROLL_TLS_KEY name PEM files; all three or none. Health checks need no token, so that orchestrators can probe.
"""

from __future__ import annotations

import hmac
import os
from collections import namedtuple
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from services.common.credentials import (
    GRPC_TOKEN,
    TLS_CA,
    TLS_CERT,
    TLS_KEY,
    InsecureError,
    is_loopback,
    read_secret,
)

_HEALTH_PREFIX = "/grpc.health.v1.Health/"
_HEADER = "authorization"
_DENIED = "the call carries no valid token: give both ends the same SPECROLL_GRPC_TOKEN"

# A call without a deadline waits for ever when its peer is frozen; one that was forgotten gets this.
DEFAULT_CALL_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class GrpcCredentials:
    """What this process shows and asks for. certificates: (CA, certificate, key) in PEM, None without TLS."""

    token: str | None = field(default=None, repr=False)
    certificates: tuple[bytes, bytes, bytes] | None = field(default=None, repr=False)
    allow_insecure: bool = False

    @classmethod
    def from_environment(cls, *, allow_insecure: bool = False) -> GrpcCredentials:
        """Raises ValueError where a file cannot be read or only some of the TLS files are named."""
        token = read_secret(GRPC_TOKEN)
        names = {variable: os.environ.get(variable) for variable in (TLS_CA, TLS_CERT, TLS_KEY)}
        if not any(names.values()):
            return cls(token, None, allow_insecure)
        missing = [variable for variable, name in names.items() if not name]
        if missing:
            raise ValueError(f"Mutual TLS needs {TLS_CA}, {TLS_CERT} and {TLS_KEY}; not set: {', '.join(missing)}.")
        ca, certificate, key = (_read_pem(variable, str(name)) for variable, name in names.items())
        return cls(token, (ca, certificate, key), allow_insecure)

    def refuse_insecure(self, host: str, action: str) -> None:
        """Raises InsecureError where `host` is beyond this machine and nothing protects the connection."""
        if is_loopback(host) or self.token or self.certificates or self.allow_insecure:
            return
        raise InsecureError(
            f"Refusing to {action} {host} without protection: set {GRPC_TOKEN}, or {TLS_CA}, {TLS_CERT} and "
            f"{TLS_KEY}, or security.allow_insecure = true on a network that you trust."
        )

    def server_credentials(self) -> grpc.ServerCredentials | None:
        if self.certificates is None:
            return None
        ca, certificate, key = self.certificates
        return grpc.ssl_server_credentials([(key, certificate)], root_certificates=ca, require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        if self.certificates is None:
            return None
        ca, certificate, key = self.certificates
        return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=certificate)


def _read_pem(variable: str, name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise ValueError(f"The file {name!r} named by {variable} cannot be read: {error.strerror}.") from error


def _allowed(details: grpc.HandlerCallDetails, expected: bytes) -> bool:
    if str(details.method).startswith(_HEALTH_PREFIX):
        return True
    for name, value in details.invocation_metadata or ():
        shown = value if isinstance(value, bytes) else str(value).encode()
        if name == _HEADER and hmac.compare_digest(shown, expected):
            return True
    return False


def _same_kind(handler: Any, behaviour: Callable[..., Any]) -> Any:
    """A handler of the same arity as `handler`, so that refusing does not depend on what the client streams."""
    make: Any = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[bool(handler.request_streaming), bool(handler.response_streaming)]
    return make(behaviour, handler.request_deserializer, handler.response_serializer)


class ServerAuth(grpc.ServerInterceptor):
    """Refuses calls without the token with UNAUTHENTICATED. For `grpc.server`."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    def intercept_service(self, continuation: Callable[..., Any], details: grpc.HandlerCallDetails) -> Any:
        handler = continuation(details)
        if handler is None or _allowed(details, self._expected):
            return handler
        return _same_kind(handler, lambda _request, context: context.abort(grpc.StatusCode.UNAUTHENTICATED, _DENIED))


class AioServerAuth(grpc.aio.ServerInterceptor):
    """Refuses calls without the token with UNAUTHENTICATED. For `grpc.aio.server`."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self, continuation: Callable[..., Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None or _allowed(details, self._expected):
            return handler

        async def deny(_request: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, _DENIED)

        return _same_kind(handler, deny)


_DETAILS = ("method", "timeout", "metadata", "credentials", "wait_for_ready", "compression")


class _CallDetails(namedtuple("_CallDetails", _DETAILS), grpc.ClientCallDetails):  # type: ignore[misc]
    """What an interceptor of `grpc` passes on; the library has an interface for it only."""


class ClientCalls(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Gives every call of a `grpc` channel the token, and a deadline where it has none."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    def _complete(self, details: grpc.ClientCallDetails) -> _CallDetails:
        values = {name: getattr(details, name, None) for name in _DETAILS}
        values["metadata"] = [*(values["metadata"] or ()), *_token_header(self._token)]
        if values["timeout"] is None:
            values["timeout"] = DEFAULT_CALL_SECONDS
        return _CallDetails(**values)

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(self._complete(details), request)

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(self._complete(details), request)

    def intercept_stream_unary(self, continuation: Any, details: Any, requests: Any) -> Any:
        return continuation(self._complete(details), requests)

    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return continuation(self._complete(details), requests)


class _AioCalls:
    def __init__(self, token: str | None) -> None:
        self._token = token

    async def _pass(self, continuation: Any, details: Any, request: Any) -> Any:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), *_token_header(self._token))
        timeout = DEFAULT_CALL_SECONDS if details.timeout is None else details.timeout
        return await continuation(details._replace(metadata=metadata, timeout=timeout), request)


# The stubs' signatures of the four kinds contradict the library's: it awaits what they declare as plain.


class _AioUnaryUnary(_AioCalls, grpc.aio.UnaryUnaryClientInterceptor):
    intercept_unary_unary = _AioCalls._pass  # type: ignore[assignment]


class _AioUnaryStream(_AioCalls, grpc.aio.UnaryStreamClientInterceptor):
    intercept_unary_stream = _AioCalls._pass  # type: ignore[assignment]


class _AioStreamUnary(_AioCalls, grpc.aio.StreamUnaryClientInterceptor):
    intercept_stream_unary = _AioCalls._pass  # type: ignore[assignment]


class _AioStreamStream(_AioCalls, grpc.aio.StreamStreamClientInterceptor):
    intercept_stream_stream = _AioCalls._pass  # type: ignore[assignment]


def aio_client_calls(token: str | None) -> list[Any]:
    """As `ClientCalls`, for `grpc.aio`, which sorts interceptors by kind and takes each for one kind only."""
    return [_AioUnaryUnary(token), _AioUnaryStream(token), _AioStreamUnary(token), _AioStreamStream(token)]


def _token_header(token: str | None) -> list[tuple[str, str]]:
    return [(_HEADER, f"Bearer {token}")] if token else []
