"""gRPC channels to Spark Connect servers, which can send a token without TLS to a server on this machine.

Spark's own client sends a token without TLS only to the host name localhost. This name may lead to ::1, where another
user could listen and receive the token. So Cairn connects to 127.0.0.1, and needs a channel of its own for it.
"""

from __future__ import annotations

import grpc
from pyspark.sql.connect.client import DefaultChannelBuilder

from cairn.spark.local_server_secret import LOOPBACK


class ConnectChannel(DefaultChannelBuilder):  # type: ignore[misc]  # PySpark is not type-checked here
    """A channel that sends a token without TLS to every address of the loopback interface.

    The name localhost also stands for ::1. A server on 127.0.0.1 does not listen on ::1. Another user could listen on
    ::1 and receive the token. So callers name 127.0.0.1 or ::1 instead.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        super().__init__(url)
        if token is not None:
            self.set(self.PARAM_TOKEN, token)

    def toChannel(self) -> grpc.Channel:
        if self.token is None or self.use_ssl or self.host.strip("[]") not in LOOPBACK:
            return super().toChannel()
        credentials = grpc.composite_channel_credentials(
            grpc.local_channel_credentials(), grpc.access_token_call_credentials(self.token)
        )
        return self._secure_channel(self.endpoint, credentials)
